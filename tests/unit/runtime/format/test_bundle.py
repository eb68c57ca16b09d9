"""The format's text: canonical JSON in both directions, and the notation of arrays."""

import pytest

from prejit.runtime.base.files import digest_of, is_digest
from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.errors import RejectError
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import Accuracy, Descriptor
from prejit.runtime.machine.fingerprint import Requirement

from .forging import PATH, refused

GOOD = b'{"architecture":"x86_64","cpu_features":["avx"],"jaxlib":"1","platform":"cpu"}'


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "expected JSON"),
        (b"\xff\xfe", "expected JSON"),
        (b'{"a":' * 4_000, "expected JSON"),
        (b"[]", "expected an object"),
        (GOOD.replace(b',"platform":"cpu"', b""), "expected the key 'platform'"),
        (GOOD.replace(b'"1"', b"1"), r"\$\.jaxlib: expected str, found 1"),
        (GOOD.replace(b'"1"', b"null"), r"\$\.jaxlib: expected str"),
        (GOOD.replace(b'["avx"]', b'"avx"'), r"cpu_features: expected a list"),
        (GOOD.replace(b'["avx"]', b"[[]]"), r"cpu_features\[0\]: expected str"),
        (GOOD.replace(b",", b", "), "expected canonical JSON"),
        (GOOD.replace(b"avx", b"\xc3\xa9"), "cpu_features: expected the form of 'avx2', found 'é'"),
        (GOOD[:-1] + b',"platform":"cpu"}', "expected canonical JSON .* no repeated keys"),
        (
            b'{"platform":"cpu","architecture":"x86_64","cpu_features":["avx"],"jaxlib":"1"}',
            "expected canonical JSON",
        ),
    ],
)
def test_other_spellings_and_types_are_rejected(content, complaint):
    assert from_json(Requirement, GOOD, PATH).cpu_features == ("avx",)
    refused(lambda: from_json(Requirement, content, PATH), complaint)


def test_a_size_is_plainly_an_integer_and_null_and_floats_are_never_written():
    content = to_json(Descriptor("type", "digest", 55555))
    assert from_json(Descriptor, content, PATH).size == 55555
    for number in ("true", "1.0", "1e3", "-0", "01", "NaN", "Infinity", "null", '"1"', "9" * 5000):
        with pytest.raises(RejectError):
            from_json(Descriptor, content.replace(b"55555", number.encode()), PATH)
    assert b"annotations" not in content
    for null in (b'{"annotations":null,', b'{"artifactType":null,', b'{"platform":null,'):
        with pytest.raises(RejectError, match="null"):
            from_json(Descriptor, content.replace(b"{", null, 1), PATH)
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            to_json({"x": value})


@pytest.mark.parametrize(
    ("text", "array"),
    [
        (
            '["cache",0,"keys"] float32[1,12,128,64] donated',
            Array(("cache", 0, "keys"), "float32", (1, 12, 128, 64), True),
        ),
        ("[] bool[]", Array((), "bool", ())),
        ("[0] int8[2,4] donated @data,", Array((0,), "int8", (2, 4), True, sharding=("data", ""))),
        (
            '["x"] float32[8,128] @data, ~batch,',
            Array(("x",), "float32", (8, 128), False, ("data", ""), ("batch", "")),
        ),
        ('["rate"] weak float32[] donated', Array(("rate",), "float32", (), True, weak=True)),
    ],
)
def test_the_notation_of_an_array_stays_as_documented(text, array):
    assert (Array.parse(text), str(array)) == (array, text)


def test_another_spelling_of_an_array_is_refused():
    for text in (
        *("", "[]", "[] float32", "[] float32[", "[] float32[,]", "[] float32[1,]", "[] weak"),
        *("[] float32[-1]", "[] float32[01]", "[] float32[1, 2]", "[] float32[\u0661]"),
        *("[] float32[1,2] ~a", "[] float32[1,2] ~,", "[] float32[1] ~a @data"),
        *("[] Float32[1]", "[]  float32[1]", "[] float32[1] donated ", "[] float32[1] weak"),
        *("[] float32[1] given", "[] float32[1]\n", "[ ] float32[1]", "[1.5] float32[1]"),
        *("[true] float32[1]", "[[1]] float32[1]", '["é"] float32[1]', '"ab" float32[1]'),
        *('{"a":1} float32[1]', "5 float32[1]", "[] float32[1] @", "[] float32[1] @,"),
        *("[] float32[1] @a-b", "[] float32[1,2] @data", "[] float32[1,2] @data,data"),
        *("[] float32[1] @data donated", "[" * 100_000),
    ):
        with pytest.raises(ValueError, match="expected"):
            Array.parse(text)


def test_what_is_no_digest_never_becomes_a_file_name():
    assert is_digest(digest_of(b""))
    for text in (
        *("", "sha256:", "sha512:" + "0" * 64, "sha256:" + "0" * 63, "sha256:" + "0" * 65),
        *("sha256:" + "A" * 64, "sha256:" + "0" * 63 + "\n", "sha256:" + "../" * 21 + "x"),
        *("SHA256:" + "0" * 64, " sha256:" + "0" * 64),
    ):
        assert not is_digest(text), text


def test_an_accuracy_that_nothing_could_have_is_rejected():
    for found in (
        '{"text":"a.txt","tokens":0,"weights":"int8"}',
        '{"perplexity_millionths":999999,"text":"a.txt","tokens":9,"weights":"int8"}',
        '{"text":"a.txt","tokens":9,"top1_agreement_millionths":1000001,"weights":"int8"}',
    ):
        with pytest.raises(RejectError, match="expected"):
            from_json(Accuracy, found.encode(), "config")
