"""Envelopes and statements from anybody: they are read as signed, or refused; nothing else is ever raised."""

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaigns.junk import mutated
from tests.extent import examples
from tests.signers import key_table, signer

from prejit.compiler.base.statement_writing import encode_bundle, encode_statement
from prejit.compiler.signing.bundle_signing import signature_statements
from prejit.runtime.trust.decision import TrustTarget, decide
from prejit.runtime.trust.policy import parse_policy
from prejit.runtime.trust.signed_statements import (
    SIGNATURE_PREDICATE,
    pae,
    read_bundle,
    read_statement,
)

INDEX = "sha256:" + "1" * 64
GOOD = encode_bundle(signer("a").envelope(encode_statement(signature_statements(INDEX, [])[INDEX])))
POLICY = parse_policy(
    f'{key_table("a")}[[rules]]\nnames = ["demo"]\nkeys = ["a"]'.encode(),
    "trust.toml",
    lambda name, of, max_bytes: b"",
    Path(),
)


def test_the_encoding_that_is_signed_is_that_of_dsse():
    # The example of the specification (secure-systems-lab/dsse, protocol.md).
    expected = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert pae(b"hello world", "http://example.com/HelloWorld") == expected
    assert pae("ä".encode(), "ä") == "DSSEv1 2 ä 2 ä".encode()


def decided(content):
    """Return why a bundle is refused; None: it is allowed."""
    return decide(POLICY, TrustTarget("demo", INDEX, INDEX), [content], None, 0.0).refusal


@given(mutated(json.loads(GOOD)))
def test_any_value_in_a_bundle_is_refused_or_does_not_matter(changed):
    content = json.dumps(changed).encode()
    if decided(content) is None:
        assert read_bundle(content).payload == read_bundle(GOOD).payload


@given(mutated(json.loads(read_bundle(GOOD).payload)))
def test_any_value_in_a_statement_is_refused_or_does_not_matter(changed):
    payload = json.dumps(changed).encode()
    if decided(encode_bundle(signer("a").envelope(payload))) is None:
        assert read_statement(payload, SIGNATURE_PREDICATE).about(INDEX) is not None


@settings(max_examples=examples(100, 300))
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_any_byte_that_is_changed_is_refused_or_does_not_matter(place, bits):
    content = bytearray(GOOD)
    content[place] ^= bits
    if decided(bytes(content)) is None:
        assert read_bundle(bytes(content)).payload == read_bundle(GOOD).payload
