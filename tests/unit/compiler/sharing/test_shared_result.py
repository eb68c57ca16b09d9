"""A result of a shared store: nobody can write one for another key, or exchange what it names."""

import base64
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.signers import signer

from prejit.compiler.sharing.shared_result import SharedResult, UnusableError, decode, encode
from prejit.compiler.store.build_cache_key import Key

KEY = Key("compile", "demo/decode", (("jaxlib", "0.10.2"), ("stablehlo", "x")))
OTHER = Key("compile", "demo/decode", (("jaxlib", "0.10.2"), ("stablehlo", "y")))
BLOB = f"sha256:{'a' * 64}"
RESULT_OF_KEY = SharedResult(KEY, {"size": 3}, {BLOB: 7})
SIGNER, STRANGER = signer("a"), signer("b")
BELIEVED = (SIGNER.public,)
_leaves = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text()
_json = st.recursive(_leaves, st.lists, max_leaves=5)
_texts = st.text(st.characters(codec="utf-8"))


@given(
    st.lists(st.tuples(_texts, _texts), max_size=4, unique_by=lambda pair: pair[0]),
    st.dictionaries(_texts, _json, max_size=3),
    st.dictionaries(st.integers(0, 2**256 - 1), st.integers(0, 2**53), max_size=3),
    st.booleans(),
)
def test_what_is_encoded_is_decoded(ingredients, result, blobs, signed):
    key = Key("compile", "name", tuple(ingredients))
    sizes = {f"sha256:{number:064x}": size for number, size in blobs.items()}
    entry = SharedResult(key, result, sizes)
    content = encode(entry, SIGNER if signed else None)
    assert decode(content, key, BELIEVED if signed else ()) == entry


def _changed(content, change):
    """Returns a result whose statement is changed; a signature stays as it was."""
    outer = json.loads(content)
    inner = json.loads(base64.b64decode(outer["stdoutRaw"]))
    if "payload" in inner:
        statement = json.loads(base64.b64decode(inner["payload"]))
        change(statement)
        inner["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    else:
        change(inner)
    outer["stdoutRaw"] = base64.b64encode(json.dumps(inner).encode()).decode()
    return json.dumps(outer).encode()


def _set(**fields):
    """Changes fields of the predicate of a statement."""
    return lambda statement: statement["predicate"].update(fields)


def _set_type(statement):
    statement["predicateType"] = "urn:other"


def _rename(statement):
    statement["subject"][0]["digest"]["sha256"] = OTHER.digest.removeprefix("sha256:")


SIGNED, UNSIGNED = encode(RESULT_OF_KEY, SIGNER), encode(RESULT_OF_KEY, None)
OTHERS = [["jaxlib", "0.10.2"], ["stablehlo", "z"]]
NOBODY, OF_KEY, DIGESTS = "a key that this build", "expected the result of", "digests of contents"
REFUSED = {
    "by nobody": (UNSIGNED, KEY, BELIEVED, "expected a signature, found none"),
    "by a stranger": (encode(RESULT_OF_KEY, STRANGER), KEY, BELIEVED, NOBODY),
    "exchanged": (_changed(SIGNED, _set(blobs={f"sha256:{'b' * 64}": 7})), KEY, BELIEVED, NOBODY),
    "another key's name": (_changed(SIGNED, _rename), OTHER, BELIEVED, NOBODY),
    "of another key": (SIGNED, OTHER, BELIEVED, OF_KEY),
    "of another key, unsigned": (UNSIGNED, OTHER, (), OF_KEY),
    "others": (_changed(UNSIGNED, _set(ingredients=OTHERS)), KEY, (), "the ingredients of"),
    "another kind": (_changed(UNSIGNED, _set(kind="lower")), KEY, (), "the ingredients of"),
    "truncated": (SIGNED[:-9], KEY, BELIEVED, "expected JSON"),
    "empty": (b"", KEY, (), "expected JSON"),
    "no statement": (b'{"stdoutRaw": "e30="}', KEY, (), "statement"),
    "not base64": (b'{"stdoutRaw": "?"}', KEY, (), "base64"),
    "too large": (b" " * (5 << 20), KEY, (), "at most"),
    "deeply nested": (b'{"stdoutRaw":' + b"[" * 10_000, KEY, (), "expected JSON"),
    "no digest": (_changed(UNSIGNED, _set(blobs={"../x": 1})), KEY, (), DIGESTS),
    "a negative size": (_changed(UNSIGNED, _set(blobs={BLOB: -1})), KEY, (), DIGESTS),
    "no result": (_changed(UNSIGNED, _set(result=None)), KEY, (), "result"),
    "predicate": (_changed(UNSIGNED, _set_type), KEY, (), "expected the predicate"),
}


def test_what_is_not_the_result_of_the_key_is_named():
    for content, key, believed, reason in REFUSED.values():
        with pytest.raises(UnusableError, match=reason):
            decode(content, key, believed)
    found = json.loads(encode(RESULT_OF_KEY, None))["outputFiles"]
    assert found == [{"path": "a" * 64, "digest": {"hash": "a" * 64, "sizeBytes": "7"}}]


@given(st.data())
def test_no_changed_byte_of_a_signed_result_changes_what_it_says(data):
    at = data.draw(st.integers(0, len(SIGNED) - 1))
    changed = bytearray(SIGNED)
    changed[at] ^= data.draw(st.integers(1, 255))
    with suppress(UnusableError):
        assert decode(bytes(changed), KEY, BELIEVED) == RESULT_OF_KEY
