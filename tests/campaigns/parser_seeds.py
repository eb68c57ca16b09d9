"""Inputs to begin with, for the parsers of `parsers`: golden ones, signed ones, and those of the pages."""

import json
import re
from datetime import UTC, datetime
from functools import cache

from tests.campaigns.campaign import ROOT
from tests.campaigns.forged_bundles import BUNDLES, draft_of
from tests.campaigns.junk import encoded

MOST_SEED_BYTES = 60_000


@cache
def golden_layers(media_type):
    """Return the golden layers of a media type, each once."""
    found = dict[str, bytes]()
    for name in BUNDLES:
        draft = draft_of(name)
        for manifest, _ in draft.targets:
            for at in manifest["layers"]:
                if media_type in at["mediaType"]:
                    found[at["digest"]] = draft.blobs[at["digest"]]
    return tuple(each for each in found.values() if len(each) <= MOST_SEED_BYTES)


def of_drafts(choose):
    return [encoded(each) for name in BUNDLES for each in choose(draft_of(name))]


@cache
def fixed_key():
    """Return a private key; the same one in every process, or a corpus would be of no use to the next."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    from prejit.compiler.signing.signers import parse_private_key

    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key = ec.derive_private_key(0x5EED, ec.SECP256R1())
    content = key.private_bytes(pem, pkcs8, serialization.NoEncryption())
    return parse_private_key(content, "the key of the campaign")


def policies():
    page = (ROOT / "docs" / "how-to" / "trust.md").read_text()
    blocks = re.findall(r'```toml title="[a-z]+\.toml"\n(.*?)```', page, re.DOTALL)
    whole = '[[rules]]\nnames = ["a*b", "*"]\nlevel = "audit"\nkeys = ["release"]\nthreshold = 1\n'
    whole += '[keys.release]\nfile = "k"\nexpires = 2099-06-30T12:00:00Z\n[revoked]\nkeys = ["release"]\n'
    return [each.encode() for each in (*blocks, whole)]


def statements():
    from prejit.compiler.base.statement_writing import encode_statement
    from prejit.runtime.trust.signed_statements import SIGNATURE_PREDICATE, SignedSubject, Statement

    subject = SignedSubject("sha256:" + "1" * 64, "demo", {"a": "b"})
    return [encode_statement(Statement(SIGNATURE_PREDICATE, (subject,) * 2, {"a": [1]}))]


def sigstore_bundles():
    from prejit.compiler.base.statement_writing import encode_bundle
    from prejit.runtime.trust.signed_statements import Envelope

    return [
        encode_bundle(Envelope(payload, (fixed_key().sign(payload),) * count, "hint"))
        for payload, count in zip((statements()[0], b"{}"), (1, 2), strict=True)
    ]


@cache
def _sigstore():
    from tests.fake_sigstore import FakeSigstore

    return FakeSigstore()


def keyless_bundles():
    return [json.dumps(_sigstore().sign(payload)).encode() for payload in (*statements(), b"{}")]


def trusted_roots():
    return [json.dumps(_sigstore().trusted_root()).encode()]


def channels():
    from prejit.compiler.signing.channels import encode_channel, keys_statement, release_statement
    from prejit.runtime.trust.signed_statements import Envelope, SignedSubject

    key, subjects = fixed_key(), (SignedSubject("sha256:" + "1" * 64, "demo", {}),)
    expires = datetime(2099, 1, 1, tzinfo=UTC)

    def signed(payload):
        return Envelope(payload, (key.sign(payload),))

    keys = keys_statement("stable", (key.public,), threshold=1, version=1, expires=expires)
    found = []
    for version, rotations in ((0, ()), (1, (signed(keys),))):
        numbers = {"version": 3, "keys_version": version, "expires": expires}
        payload = release_statement("stable", "demo", subjects, **numbers)
        found.append(encode_channel(rotations, signed(payload)))
    return found


def channel_states():
    digest = "sha256:" + "1" * 64
    state = {
        **{"keys": [fixed_key().public.pem], "keys_version": 0, "threshold": 1, "expires": None},
        **{"version": 2, "release_keys_version": 0, "release": digest},
        "began": "0 1 " + "1" * 64,
    }
    return [json.dumps(state | more).encode() for more in ({}, {"expires": 4e9})]


def chats():
    templates = (
        "{% for m in messages %}{{ '<' ~ m['role'] ~ '>' ~ m.content | trim }}{% endfor %}",
        "{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% set x = namespace(a=0) %}"
        "{% for m in messages if m.role != 'tool' %}{% set x.a = x.a + loop.index %}"
        "{{ m.content.split('a')[-1] | replace('b', 'c') }}{% endfor %}{{ '%5s' % x.a }}",
        "{% macro f(a, n=2) %}{{ a * n }}{{ f(a[:1], 1) if n > 1 }}{% endmacro %}{{ f('ab') }}"
        "{{ raise_exception('no') if false else strftime_now('%Y') }}{{ '{:>4}'.format(bos) }}",
    )
    return [
        encoded({"special_tokens": {"bos": "<s>"}, "templates": {"default": template}})
        for template in templates
    ]


def request_bodies():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "c"},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    bodies = [
        {"messages": messages, "tools": [tool], "temperature": 0.5, "stream": True},
        {"messages": messages[:2], "response_format": {"type": "json_object"}},
        {"prompt": ["a", "b"], "max_tokens": 4, "logprobs": 2, "stop": ["x"]},
        {"prompt": [[1, 2], [3]], "n": 2, "echo": True, "logit_bias": {"5": 1}},
        {"input": ["a"], "encoding_format": "base64", "dimensions": 8},
        {"input": [{"role": "user", "content": "a"}], "max_output_tokens": 4},
        {"messages": messages[:2], "add_generation_prompt": True},
        {"tokens": [1, 2, 3]},
    ]
    return [json.dumps({"model": "m", **body}).encode() for body in bodies]


def infer_requests():
    tensors = [
        {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2.5, -3, 4]},
        {"name": "y", "datatype": "INT64", "shape": [1], "data": [2**40]},
        {"name": "z", "datatype": "BOOL", "shape": [2], "data": [True, False]},
    ]
    plain = json.dumps({"id": "1", "inputs": tensors, "outputs": [{"name": "x"}]}).encode()
    binary = {**tensors[0], "parameters": {"binary_data_size": 16}}
    del binary["data"]
    head = json.dumps({"inputs": [binary]}).encode()
    return [plain, head + bytes(16)]


def build_manifests():
    directory = ROOT / "manifests"
    # Files and models are named beside the manifest, and the parser reads it in another directory.
    beside = re.compile(r'^(license|source) = "(?!/|hf:)', flags=re.MULTILINE)
    texts = (path.read_text() for path in sorted(directory.glob("*.toml")))
    return [beside.sub(rf'\1 = "{directory}/', text).encode() for text in texts]


def this_machine():
    from prejit.runtime.base.typed_json import to_json
    from prejit.runtime.machine.fingerprint import Fingerprint

    return [to_json(Fingerprint.current())]
