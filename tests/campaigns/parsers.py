"""The parsers of what others write: name, entry point, and inputs to begin with. For `parser_fuzz`."""

import contextlib
import importlib
import json
import os
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest import mock

from tests.campaigns import junk, parser_seeds
from tests.campaigns.forged_bundles import BUNDLES, draft_of, sound
from tests.campaigns.parser_seeds import fixed_key, golden_layers, of_drafts

Form = Literal["json", "toml", "bytes"]


@dataclass(frozen=True)
class Parser:
    modules: tuple[str, ...]  # what is measured and steers: prefixes of the names of modules
    make: Callable[[], Callable[[bytes], object]]  # imports the parser; called once
    seeds: Callable[[], Sequence[bytes]]
    form: Form = "json"  # how inputs are changed besides flipped bytes


def _by(name, *more):
    """Return what imports `room.module:function` of the runtime, to be called with the bytes and more."""

    def make():
        module, _, attribute = name.partition(":")
        function = importlib.import_module(f"prejit.{module}")
        for part in attribute.split("."):
            function = getattr(function, part)
        return lambda content: function(content, *more)

    return make


def _file_by(file, name):
    return lambda: _of_file(file, _by(name)())


def _of_file(name, read):
    """Return a parser of bytes by one of a file, which lies in the working directory."""

    def parse(content):
        Path(name).write_bytes(content)
        Path(name).chmod(0o600)
        return read(name)

    return parse


def _root():
    from prejit.runtime.format.layout import Layout
    from prejit.runtime.format.referrers import referrers
    from prejit.runtime.format.root import read_root

    for name, content in [item for each in BUNDLES for item in sound(each).items()]:
        path = Path("layout", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    layout = Layout("layout")

    def read(_):
        return referrers(layout, read_root(layout))

    return _of_file("layout/index.json", read)


def _index():
    from prejit.runtime.fallback_reporting import closest_target
    from prejit.runtime.format.checks.oci import check_index
    from prejit.runtime.format.opening import match
    from prejit.runtime.format.root import Root
    from prejit.runtime.machine.fingerprint import Fingerprint

    machine = Fingerprint.current()

    def parse(content):
        index = check_index(content, "index")
        targets = match(Root("", index, "index", None, ()), machine)
        return closest_target(targets).verdict.reason()

    return parse


def _config():
    from prejit.runtime.base.typed_json import from_json, to_json
    from prejit.runtime.errors import RejectError
    from prejit.runtime.format.checks.call_programs import check_arrays, check_static, check_tree
    from prejit.runtime.format.checks.program_table import (
        check_config,
        check_weight_sets,
        segments_of,
    )
    from prejit.runtime.machine.fingerprint import Requirement

    whole = from_json(Requirement, to_json(draft_of("decoder").targets[0][1]["requirement"]), "")

    def parse(content):
        target, requirement = "", whole
        with contextlib.suppress(ValueError, RecursionError, RejectError, KeyError, TypeError):
            plain = json.loads(content)
            target = plain["target"]
            requirement = from_json(Requirement, to_json(plain["requirement"]), "")
        config = check_config(content, target, requirement, "config")
        for program in config.programs:
            for texts, tree in (
                (program.arguments, program.arguments_tree),
                (program.results, program.results_tree),
            ):
                arrays = check_arrays(texts, program.kind, config.mesh, "config")
                if program.kind == "call":
                    check_tree(tree, arrays, "config")
            check_static(program, "config")
        check_weight_sets(config, {}, "config")
        return segments_of(config)

    return parse


def _policy():
    from prejit.runtime.trust.policy import parse_policy

    pem = fixed_key().public.pem.encode()

    def parse(content):
        policy = parse_policy(content, "trust.toml", lambda *_: pem, Path("/"))
        return [policy.rule_for(name) for name in ("demo", "a" * 300 + "b", "")]

    return parse


def _sigstore_bundle():
    from prejit.runtime.trust.signed_statements import read_bundle

    key = fixed_key().public

    def parse(content):
        envelope = read_bundle(content)
        return [key.verifies(each, envelope.payload) for each in envelope.signatures[:1]]

    return parse


def _keyless():
    import sigstore.verify  # here, so that its coverage counts  # noqa: F401
    from tests.fake_sigstore import IDENTITY, ISSUER

    from prejit.runtime.trust.keyless_trust import TrustedIdentity, verify
    from prejit.runtime.trust.signed_statements import read_bundle

    root = parser_seeds.trusted_roots()[0]
    trusted = TrustedIdentity("ci", IDENTITY, ISSUER, root, "trust.toml")

    def parse(content):
        envelope = read_bundle(content)
        return verify(content, envelope, trusted) if envelope.is_keyless else None

    return parse


def _trusted_root():
    import sigstore.verify  # noqa: F401
    from tests.fake_sigstore import IDENTITY, ISSUER

    from prejit.runtime.trust.keyless_trust import TrustedIdentity, check_root, verify
    from prejit.runtime.trust.signed_statements import read_bundle

    signed = parser_seeds.keyless_bundles()[0]
    envelope = read_bundle(signed)

    def parse(content):
        check_root(content, "trust.toml")
        trusted = TrustedIdentity("ci", IDENTITY, ISSUER, content, "trust.toml")
        return verify(signed, envelope, trusted)

    return parse


def _channel():
    from prejit.runtime.trust import channel

    last = channel.Accepted(channel.KeySet(0, (fixed_key().public,), 1))

    def parse(content):
        # All signatures are right, whatever the payload is: else nothing behind them would be reached.
        with mock.patch.object(channel, "signers", lambda _, keys: {each.id for each in keys}):
            return channel.accept(content, "stable", last, 1.8e9)

    return parse


def _library():
    from prejit.runtime.errors import RejectError
    from prejit.runtime.format.checks.elf import find_note, read_shared_library

    def parse(content):
        try:
            return read_shared_library(content), find_note(content, b"prejit")
        except ValueError as error:  # as `check_kernels` has it
            raise RejectError("library", str(error)) from error

    return parse


def _chat():
    from prejit.runtime.format.checks.seldom_parts import check_chat
    from prejit.runtime.text.chat_template import ChatTemplates

    chat_messages = [{"role": "user", "content": "aab"}, {"role": "assistant", "content": "b"}]

    def parse(content):
        templates = ChatTemplates(check_chat(content, "chat"), "chat")
        return templates.render(
            chat_messages, add_generation_prompt=True, tools=[{"name": "f"}], variables={}
        )

    return parse


def _tokenizer():
    from prejit.runtime.text.tokenizer import Tokenizer

    def parse(content):
        tokenizer = Tokenizer(content, "tokenizer")
        return tokenizer.decode(tokenizer.encode("a golden bundle", max_tokens=100)[:50])

    return parse


def _first_load():
    from prejit.runtime.trust.first_load import first_load_file, first_load_outcome

    key = "sha256:" + "1" * 64
    os.environ["PREJIT_RUNTIME_CACHE"] = os.getcwd()
    first_load_file(key).parent.mkdir(parents=True, mode=0o700)
    return _of_file(str(first_load_file(key)), lambda _: first_load_outcome(key))


def _request():
    import asyncio

    import msgspec

    from prejit.runtime.errors import UsageError
    from prejit.server.gate.http_errors import ApiError
    from prejit.server.openai import (
        chat_completions,
        chat_messages,
        completions,
        encoder_endpoints,
        models_and_tokens,
        prompts,
        responses,
        responses_schema,
    )
    from prejit.server.openai.bodies import read

    expected = (ApiError, UsageError, msgspec.DecodeError, UnicodeDecodeError)
    chat, reply = chat_completions, responses
    uses = {
        chat._DECODER: (
            chat._check,
            chat._constraint,
            lambda body: chat_messages.for_template(body.messages),
        ),
        completions._DECODER: (
            completions._check,
            lambda body: prompts.as_inputs("prompt", body.prompt),
        ),
        encoder_endpoints._EMBED: (lambda body: encoder_endpoints._inputs(body.input),),
        responses_schema.DECODER: (reply._constraint, reply._tools, reply.messages_of),
        models_and_tokens._TOKENIZE: (),
        models_and_tokens._DETOKENIZE: (),
    }
    settings = SimpleNamespace(ignore_unknown_fields=False)

    async def read_all(content):
        async def body():
            return content

        for decoder, checks in uses.items():
            with contextlib.suppress(*expected):
                found = await read(SimpleNamespace(body=body), decoder, settings)
                for check in checks:
                    check(found)

    return lambda content: asyncio.run(read_all(content))


def _infer_request():
    import msgspec

    from prejit.runtime.errors import UsageError
    from prejit.server.inference.inference_routes import _read

    model = SimpleNamespace(inputs=[SimpleNamespace(name="x", datatype="FP32")])

    def parse(content):
        end = str(content.rfind(b"}") + 1)
        for length in (None, end):
            try:
                _read(content, length, model)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise UsageError(str(error)) from error
        return None

    return parse


def _signature():
    from prejit.runtime.device.device import _parse_signature

    return lambda content: _parse_signature(content.decode("latin-1"))


def _golden(media_type):
    return lambda: golden_layers(media_type)


def _of(choose):
    return lambda: of_drafts(choose)


_FORMAT = ("prejit.runtime.format", "prejit.runtime.base", "prejit.runtime.machine")
_TRUST = ("prejit.runtime.trust", "prejit.runtime.base")
_SIGSTORE = (*_TRUST, "sigstore")
_TEXT = ("prejit.runtime.text", "prejit.runtime.base")
_FIRST_LOAD = {"key": "sha256:" + "1" * 64, "outcome": "loaded"}
_XLA = (
    b"HloModule f, input_output_alias={ {0}: (2, {}, may-alias) }, "
    b"entry_computation_layout={(f32[2,3]{1,0}, s32[], f32[2]{0})->(f32[2]{0}, pred[])}"
)
_manifest = _by("runtime.format.checks.oci:check_manifest", "manifest")
_weights = _by("runtime.format.checks.layers:check_weights", "weights")
_key = _by("runtime.trust.public_keys:read_key", "key")
_cosign = "https://sigstore.dev/cosign/sign/v1"
_statement = _by("runtime.trust.signed_statements:read_statement", _cosign)
_state = _by("runtime.trust.channel_following:_read", Path("state"))
_generation = _by("runtime.generation.options:check_generation", "generation config")
_print = _file_by("fingerprint.json", "runtime.machine.fingerprint:Fingerprint.read")
_server_keys = _file_by("keys", "server.gate.api_keys:Keys")
_toml = _file_by("manifest.toml", "compiler.manifest.reading:read_manifest")

PARSERS = {
    "root": Parser(_FORMAT, _root, lambda: [sound(n)["index.json"] for n in BUNDLES]),
    "index": Parser((*_FORMAT, "prejit.runtime.verdict"), _index, _of(lambda d: [d.index])),
    "manifest": Parser(_FORMAT, _manifest, _of(lambda d: [manifest for manifest, _ in d.targets])),
    "config": Parser(_FORMAT, _config, _of(lambda d: [config for _, config in d.targets])),
    "weights": Parser(_FORMAT, _weights, _golden("weights"), "bytes"),
    "library": Parser(_FORMAT, _library, _golden("kernels"), "bytes"),
    "policy": Parser((*_TRUST, "tomllib"), _policy, parser_seeds.policies, "toml"),
    "key": Parser(_TRUST, _key, lambda: [fixed_key().public.pem.encode()], "bytes"),
    "sigstore bundle": Parser(_TRUST, _sigstore_bundle, parser_seeds.sigstore_bundles),
    "keyless signature": Parser(_SIGSTORE, _keyless, parser_seeds.keyless_bundles),
    "trusted root": Parser(_SIGSTORE, _trusted_root, parser_seeds.trusted_roots),
    "statement": Parser(_TRUST, _statement, parser_seeds.statements),
    "channel": Parser(_TRUST, _channel, parser_seeds.channels),
    "channel state": Parser(_TRUST, _state, parser_seeds.channel_states),
    "chat": Parser(_TEXT, _chat, parser_seeds.chats),
    "tokenizer": Parser(_TEXT[:1], _tokenizer, _golden("tokenizer")),
    "generation": Parser(
        ("prejit.runtime.generation.options",), _generation, _golden("generation")
    ),
    "fingerprint": Parser(_FORMAT, _print, parser_seeds.this_machine),
    "first load": Parser(
        ("prejit.runtime.trust.first_load",),
        _first_load,
        lambda: [json.dumps(_FIRST_LOAD).encode()],
    ),
    "request": Parser(("prejit.server",), _request, parser_seeds.request_bodies),
    "inference request": Parser(("prejit.server",), _infer_request, parser_seeds.infer_requests),
    "server keys": Parser(
        ("prejit.server.gate.api_keys",),
        _server_keys,
        lambda: [b"# a\nname: 0123456789abcdef\nfedcba9876543210\n"],
        "bytes",
    ),
    "build manifest": Parser(
        ("prejit.compiler.manifest", "tomllib"), _toml, parser_seeds.build_manifests, "toml"
    ),
    "signature of XLA": Parser(
        ("prejit.runtime.device.device",), _signature, lambda: [_XLA], "bytes"
    ),
}


def changed(content, form, generator):
    """Return a value with parts changed, taken away, doubled or exchanged; None: it has not this form."""
    with contextlib.suppress(ValueError, RecursionError):
        match form:
            case "json":
                if generator.random() < 0.2:
                    return junk.huge_numbers(generator)(content)
                return junk.encoded(junk.edited(json.loads(content), generator))
            case "toml":
                return _changed_lines(content.decode(), generator).encode()
            case _:
                return junk.damaged(content, generator)
    return None


_WORDS = ("true", "-1", "0", "1e400", "9" * 30)
_WORDS += ('""', '"*"', "[]", "{}", '["a"]', "2026-11-22", "nan")


def _changed_lines(text, generator):
    """Return TOML with a line doubled, moved or taken away, or with another value."""
    lines = text.splitlines()
    if not lines:
        return "a = 1"
    place = generator.randrange(len(lines))
    match generator.randrange(4):
        case 0:
            lines.insert(generator.randrange(len(lines)), lines[place])
        case 1:
            del lines[place]
        case 2:
            lines[place] = lines[place].partition("=")[0] + f"= {generator.choice(_WORDS)}"
        case _:
            with contextlib.suppress(ValueError):
                tomllib.loads(lines[place])
                key, _, value = lines[place].partition("=")
                lines[place] = f"{key}{'x' if generator.random() < 0.5 else '.a'} ={value}"
    return "\n".join(lines) + "\n"
