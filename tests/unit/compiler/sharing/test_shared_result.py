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


def _changed(content, change=None, **predicate):
    """Returns a result whose statement, or its predicate, is changed; a signature stays as it was."""
    outer = json.loads(content)
    inner = json.loads(base64.b64decode(outer["stdoutRaw"]))
    statement = json.loads(base64.b64decode(inner["payload"])) if "payload" in inner else inner
    statement["predicate"].update(predicate)
    statement.update(change or {})
    if "payload" in inner:
        inner["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    outer["stdoutRaw"] = base64.b64encode(json.dumps(inner).encode()).decode()
    return json.dumps(outer).encode()


SIGNED, UNSIGNED = encode(RESULT_OF_KEY, SIGNER), encode(RESULT_OF_KEY, None)
SUBJECT = [{"digest": {"sha256": OTHER.digest.removeprefix("sha256:")}}]
OTHERS = [["jaxlib", "0.10.2"], ["stablehlo", "z"]]
NOBODY, OF_KEY, DIGESTS = "a key that this build", "expected the result of", "digests of contents"
REFUSED = {
    "by nobody": (UNSIGNED, KEY, BELIEVED, "expected a signature, found none"),
    "by a stranger": (encode(RESULT_OF_KEY, STRANGER), KEY, BELIEVED, NOBODY),
    "exchanged": (_changed(SIGNED, blobs={f"sha256:{'b' * 64}": 7}), KEY, BELIEVED, NOBODY),
    "another key's name": (_changed(SIGNED, {"subject": SUBJECT}), OTHER, BELIEVED, NOBODY),
    "of another key": (SIGNED, OTHER, BELIEVED, OF_KEY),
    "of another key, unsigned": (UNSIGNED, OTHER, (), OF_KEY),
    "others": (_changed(UNSIGNED, ingredients=OTHERS), KEY, (), "the ingredients of"),
    "another kind": (_changed(UNSIGNED, kind="lower"), KEY, (), "the ingredients of"),
    "truncated": (SIGNED[:-9], KEY, BELIEVED, "expected JSON"),
    "empty": (b"", KEY, (), "expected JSON"),
    "no statement": (b'{"stdoutRaw": "e30="}', KEY, (), "statement"),
    "not base64": (b'{"stdoutRaw": "?"}', KEY, (), "base64"),
    "too large": (b" " * (5 << 20), KEY, (), "at most"),
    "deeply nested": (b'{"stdoutRaw":' + b"[" * 10_000, KEY, (), "expected JSON"),
    "no digest": (_changed(UNSIGNED, blobs={"../x": 1}), KEY, (), DIGESTS),
    "a negative size": (_changed(UNSIGNED, blobs={BLOB: -1}), KEY, (), DIGESTS),
    "no result": (_changed(UNSIGNED, result=None), KEY, (), "result"),
    "predicate": (_changed(UNSIGNED, {"predicateType": "x"}), KEY, (), "expected the predicate"),
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
