"""Hostile bundles through the full loader: each in a child process that loads and runs it.

    PREJIT_LOADS_EXAMPLES=2000 .venv/bin/python -m tests.campaigns.loads      all of them, and loads.json
    .venv/bin/python -m tests.campaigns.loads --only NUMBER --keep DIRECTORY  one again, and its files

Bundles of this machine are signed, then changed as `fuzz` changes golden ones, and in the bytes of their
executables, portable programs and kernels besides, with all digests right. Each child process is a fork of
one that has imported everything. It asks first whether a policy lets the bundle run, then loads it without a
policy.

What must hold:

- A bundle whose digests are wrong somewhere is rejected, or its answers are right.
- No example ends with an exception that is not prejit's, nor with a message that no terminal should show.
- The policy allows nothing but what was signed, byte for byte.
- No process crashes, hangs, or takes much more time or memory than with the sound bundle: but by bytes of
  code (executables, portable programs, kernels) that their author changed. A policy refuses each of these.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import zstandard
from tests.campaigns import fuzz

from prejit.runtime.device.kernels import kernels_of
from prejit.runtime.format.names import kernel_target

RESULTS = Path(__file__).with_name("loads.json")
ROOT = Path(__file__).parents[2]
MOST_SECONDS = 0.2
MOST_BYTES = 64 << 20
"""The CPU time and memory that an example may take beyond those of the sound bundle."""
CPU_SECONDS = 20
WALL_SECONDS = 120
MEMORY_BYTES = 6 << 30
"""Limits of a child process. The kernel or the campaign ends one that needs more."""
CODE = ("executable bytes", "portable bytes", "kernel bytes", "programs exchanged")
"""Kinds of attacks on the code itself."""
BY_CODE = "by bytes of code that a policy refuses"


# Attacks on code


def _repacked(
    draft: fuzz.Draft, place: int, key: str, change: Callable[[str, bytes], bytes]
) -> None:
    """Write a pack of a target again with changed programs, and set all digests right.

    Args:
        draft: the bundle.
        place: of the target.
        key: `executable` or `portable`.
        change: takes the name and the bytes of each program.
    """
    manifest, config = draft.targets[place]
    layer = fuzz._pack_of(manifest, config, config["programs"][0][key])
    content, pack = draft.blobs[layer["digest"]], b""
    written: dict[bytes, int] = {}
    for program in config["programs"]:
        segment = program[key]
        frame = content[segment["offset"] : segment["offset"] + segment["size"]]
        raw = zstandard.ZstdDecompressor().decompress(frame)
        new = change(program["name"], raw)
        if new != raw:
            frame = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(new)
        if frame not in written:
            written[frame] = len(pack)
            pack += frame
        program[key] = {
            "offset": written[frame],
            "size": len(frame),
            "digest": fuzz.digest_of(frame),
            "raw_size": len(new),
            "raw_digest": fuzz.digest_of(new),
        }
    fuzz.put(draft, config, layer, pack)


def _program_bytes(draft: fuzz.Draft, generator: random.Random, key: str) -> None:
    """Change the bytes of one program."""
    place = generator.randrange(len(draft.targets))
    chosen = generator.choice(draft.targets[place][1]["programs"])["name"]
    how = generator.choice([fuzz.flipped, fuzz.cut, fuzz.zeroed])
    _repacked(draft, place, key, lambda name, raw: how(raw, generator) if name == chosen else raw)


def _kernel_bytes(draft: fuzz.Draft, generator: random.Random) -> None:
    """Change the bytes of the kernels. Executables call them by their digest, so bind these again."""
    place = generator.randrange(len(draft.targets))
    manifest, config = draft.targets[place]
    layers = [at for at in manifest["layers"] if "kernels" in at["mediaType"]]
    if not layers:
        _program_bytes(draft, generator, "executable")
        return
    how = generator.choice([fuzz.flipped, fuzz.flipped, fuzz.cut, fuzz.zeroed])
    old, before = layers[0]["digest"], draft.blobs[layers[0]["digest"]]
    content = how(before, generator)
    fuzz.put(draft, config, layers[0], content)
    new = fuzz.digest_of(content)
    bound = [
        (kernel_target(name, old).encode(), kernel_target(name, new).encode())
        for name in kernels_of(before)
    ]

    def rebind(_: str, raw: bytes) -> bytes:
        for one, other in bound:
            raw = raw.replace(one, other)
        return raw

    _repacked(draft, place, "executable", rebind)


def _programs_exchanged(draft: fuzz.Draft, generator: random.Random) -> None:
    _, config = generator.choice(draft.targets)
    one, other = generator.choice(config["programs"]), generator.choice(config["programs"])
    one["executable"], other["executable"] = other["executable"], one["executable"]


def changed(name: str, generator: random.Random) -> tuple[str, dict[str, bytes]]:
    """Return a kind of change, and the files of a bundle after it."""
    chosen = generator.random()
    if chosen < 0.25:
        return fuzz.damaged(name, generator)
    if chosen < 0.6:
        return fuzz.attacked(name, generator)
    draft, kind = fuzz.draft_of(name), generator.choice(CODE)
    match kind:
        case "executable bytes":
            _program_bytes(draft, generator, "executable")
        case "portable bytes":
            _program_bytes(draft, generator, "portable")
        case "kernel bytes":
            _kernel_bytes(draft, generator)
        case _:
            _programs_exchanged(draft, generator)
    return kind, draft.files()


def code_of(files: dict[str, bytes]) -> frozenset[str] | None:
    """Return the digests of all code that the configs of a bundle name; None: it has no readable config."""
    found = set[str]()
    for content in files.values():
        if not content.startswith(b"{") or b'"programs"' not in content:
            continue
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            config = json.loads(content)
            for program in config["programs"]:
                for key in ("executable", "portable"):
                    found.add(f"{program['name']} {key} {program[key]['raw_digest']}")
            found.add(f"kernels {(config.get('kernels') or {}).get('digest')}")
    return frozenset(found) or None


# In the child process


@dataclass(frozen=True)
class Sound:
    """A sound bundle.

    Attributes:
        name: its directory.
        policy: a policy that allows what its key has signed.
        identities: digests of config and layers of each target.
        has_decoder: whether it has one: it takes too long to compile in a fallback.
        answer: what its programs answer.
    """

    name: str
    policy: str
    identities: tuple[str, ...]
    has_decoder: bool
    answer: str = ""


def identity(config: str, layers: Sequence[str]) -> str:
    """Return the digest of all that a target is made of."""
    return hashlib.sha256(json.dumps([config, sorted(layers)]).encode()).hexdigest()


def answer_of(bundle: Any) -> str:
    """Run what a bundle can do, and return the answers as text."""
    said: list[object] = []
    if bundle.config.decoder is not None:
        result = bundle.generate([1, 2, 3], max_new_tokens=4, stop_token_ids=(), temperature=0)
        said.append(result.token_ids)
    for program in bundle.config.programs:
        if program.kind == "call":
            result = bundle.runner_with_zeros(program)()
            said.append([program.name, result.tobytes().hex()])
    return json.dumps(said)


def _load(path: Path, *, falls_back: bool, trust: str | None = None) -> Any:
    from prejit.runtime import Fingerprint, load

    if not falls_back:
        return load(path, on_mismatch="error", trust=trust)
    other = replace(Fingerprint.current(), jaxlib="0.0.1")
    return load(path, on_mismatch="jit", fingerprint=other, trust=trust)


def use(path: Path, sound: Sound, *, falls_back: bool, tell: Any) -> None:
    """Ask the policy, then load the bundle and run it. Report each step by `tell(key=value)`."""
    from prejit.runtime.base.files import digest_of
    from prejit.runtime.base.typed_json import to_json
    from prejit.runtime.errors import PrejitError

    warnings.simplefilter("ignore")
    try:
        with _load(path, falls_back=falls_back, trust=sound.policy) as bundle:
            parts = bundle._open
            layers = [layer.digest for layer in parts.layers.values()]
            found = identity(digest_of(to_json(bundle.config)), layers)
            tell(policy="allowed" if found in sound.identities else "allowed what is not signed")
    except PrejitError as error:
        tell(policy=type(error).__name__)
    Path("/proc/self/clear_refs").write_text("5")
    before, started = fuzz.memory_of("VmRSS"), time.process_time()
    try:
        with _load(path, falls_back=falls_back) as bundle:
            bundle.prepare()
            answer = answer_of(bundle)
        outcome, text = ("right" if answer == sound.answer else "another answer"), answer
    except PrejitError as error:
        outcome, text = type(error).__name__, str(error)
    except Exception as error:
        outcome, text = f"traceback: {type(error).__name__}", traceback.format_exc()
    seconds = time.process_time() - started
    tell(
        outcome=outcome,
        text=text[:5000],
        seconds=seconds,
        more_bytes=fuzz.memory_of("VmHWM") - before,
    )


def fork_and_use(path: Path, sound: Sound, *, falls_back: bool, shows: bool) -> dict[str, Any]:
    """Return what a child process reports, and under `ended` how it ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _become_small(shows)

        def tell(**said: Any) -> None:
            os.write(writer, json.dumps(said).encode() + b"\n")

        status = 1
        try:
            use(path, sound, falls_back=falls_back, tell=tell)
            status = 0
        except BaseException:
            tell(outcome="traceback: of the campaign", text=traceback.format_exc()[:5000])
        finally:
            os._exit(status)
    os.close(writer)
    said, hung = _read_all(reader, child)
    _, status = os.waitpid(child, 0)
    found: dict[str, Any] = {}
    for line in said.splitlines():
        with contextlib.suppress(ValueError):
            found |= json.loads(line)
    code = os.waitstatus_to_exitcode(status)
    if hung or code in (-signal.SIGXCPU, -signal.SIGKILL):
        found["ended"] = "hang"
    elif code < 0:
        found["ended"] = signal.Signals(-code).name
    elif "outcome" not in found:
        found["ended"] = f"status {code}"
    return found


def _become_small(shows: bool) -> None:
    """Limit the child process, and take its output away."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    os.setsid()
    if not shows:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)


def _read_all(reader: int, child: int) -> tuple[bytes, bool]:
    """Return all that a child process writes, and whether it was killed because it took too long."""
    said, until, hung = b"", time.monotonic() + WALL_SECONDS, False
    with open(reader, "rb", buffering=0) as file:
        while True:
            ready, _, _ = select.select([file], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                os.killpg(child, signal.SIGKILL)
                hung = True
                break
            piece = file.read(1 << 16)
            if not piece:
                break
            said += piece
    return said, hung


# What becomes of them


@dataclass
class Tried:
    """An example and its outcome.

    Attributes:
        number: the example.
        bundle, kind: the sound bundle, and what was done to it.
        policy: what the policy said: `allowed`, or the name of an error.
        outcome: `right`, `another answer`, the name of an error, or how the process ended.
        by_code: an end, time or memory that is there because of bytes of code; empty: nothing of the kind.
        problem: what is bad; empty: nothing.
        seconds, more_bytes: CPU time and memory beyond those of the sound bundle.
    """

    number: int
    bundle: str
    kind: str
    policy: str
    outcome: str
    by_code: str
    problem: str
    seconds: float
    more_bytes: int


class Loads:
    """Tries examples of some bundles in a directory in memory. Use it in a `with` statement."""

    def __init__(self, bundles: Sequence[Path], policy: Path) -> None:
        self._stack = contextlib.ExitStack()
        root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._at = Path(self._stack.enter_context(tempfile.TemporaryDirectory(dir=root)))
        self._cache = self._at / "cache"
        os.environ["PREJIT_RUNTIME_CACHE"] = str(self._cache)
        self._bundles = fuzz.BundleFiles()
        _import_all()
        found = [_sound(bundle, policy) for bundle in bundles]
        self._sound = [replace(each, answer=self._measure(each, False)[2]) for each in found]
        self._usual = {
            (each.name, falls_back): self._measure(each, falls_back)[:2]
            for each in self._sound
            for falls_back in ((False,) if each.has_decoder else (False, True))
        }

    def __enter__(self) -> Loads:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _measure(self, sound: Sound, falls_back: bool) -> tuple[float, int, str]:
        """Return CPU time and memory of a sound bundle, and its answer."""
        path = self._bundles.write(self._at / Path(sound.name).name, fuzz.sound(sound.name))
        tries = [self._use(path, sound, falls_back) for _ in range(3)]
        for said in tries:
            assert said.get("outcome") in ("right", "another answer"), (sound.name, said)
            assert said["policy"] == "allowed", (sound.name, said)
        seconds, more = (max(said[key] for said in tries) for key in ("seconds", "more_bytes"))
        return seconds, more, tries[0]["text"]

    def _use(
        self, path: Path, sound: Sound, falls_back: bool, shows: bool = False
    ) -> dict[str, Any]:
        shutil.rmtree(self._cache, ignore_errors=True)
        return fork_and_use(path, sound, falls_back=falls_back, shows=shows)

    def attempt(self, number: int, *, keep: Path | None = None) -> Tried:
        """Try one example; keep: write its files into this directory, and show what its process prints."""
        generator = random.Random(number)
        sound = generator.choice(self._sound)
        kind, files = changed(sound.name, generator)
        falls_back = kind == "portable bytes" and not sound.has_decoder
        path = self._bundles.write(self._at / Path(sound.name).name, files)
        if keep is not None:
            shutil.copytree(path, keep)
        said = self._use(path, sound, falls_back, keep is not None)
        if keep is not None:
            print(json.dumps(said, indent=1))
        usual_seconds, usual_bytes = self._usual[sound.name, falls_back]
        more = sum(map(len, files.values())) - sum(map(len, fuzz.sound(sound.name).values()))
        allowed = MOST_SECONDS + fuzz.SECONDS_PER_BYTE * max(0, more)
        for _ in range(4):  # other processes may have had the CPU
            if said.get("seconds", 0.0) - usual_seconds > allowed:
                again = self._use(path, sound, falls_back)
                said = min(said, again, key=lambda each: each.get("seconds", 0.0))
        seconds = said.get("seconds", 0.0) - usual_seconds
        more_bytes = said.get("more_bytes", 0) - usual_bytes
        excess = ""
        if "ended" in said:
            excess = f"ended: {said['ended']}"
        elif seconds > allowed:
            excess = f"took {seconds:.2f} s more than the sound bundle"
        elif more_bytes > MOST_BYTES:
            excess = f"took {more_bytes >> 20} MB more than the sound bundle"
        of_code = code_of(files) != code_of(fuzz.sound(sound.name))
        by_code, problem = judged(said, excess, sound.answer, kind=kind, of_code=of_code)
        name, policy = Path(sound.name).name, said.get("policy", "no answer")
        outcome = said.get("ended") or said["outcome"]
        return Tried(number, name, kind, policy, outcome, by_code, problem, seconds, more_bytes)


def judged(
    said: dict[str, Any], excess: str, answer: str, *, kind: str, of_code: bool
) -> tuple[str, str]:
    """Return what is there because of bytes of code, and what is bad; empty: nothing.

    Args:
        said: what the child process reported, and how it ended.
        excess: an end that is no exit, or time or memory beyond those of the sound bundle; empty: none.
        answer: the sound bundle's.
        kind: of the change.
        of_code: whether it changed code.
    """
    policy, outcome = said.get("policy", "no answer"), said.get("ended") or said["outcome"]
    text = said.get("text", "")
    if policy in ("allowed what is not signed", "no answer"):
        return "", f"the policy: {policy}"
    if outcome.startswith("traceback"):
        return "", text
    if excess:
        refused = policy in ("UntrustedError", "RejectError")
        return (excess, "") if of_code and refused else ("", excess)
    if outcome == "another answer" and (policy == "allowed" or not of_attacker(kind)):
        return "", f"expected {answer:.200}, found {text:.200}"
    if outcome not in ("right", "another answer") and fuzz._is_unfit(text):
        return "", f"an error that no terminal should show: {text!r:.300}"
    return "", ""


def of_attacker(kind: str) -> bool:
    """Return whether all digests are right after a change of this kind."""
    return kind in CODE or kind in fuzz._ATTACKS


def _import_all() -> None:
    """Import what a load imports, without a thread or a client of XLA: forks inherit no threads."""
    import prejit.runtime.bundle
    import prejit.runtime.bundle_batches
    import prejit.runtime.device.kernels
    import prejit.runtime.device.portable
    import prejit.runtime.format.verifying
    import prejit.runtime.generation.cache_growth
    import prejit.runtime.generation.decode
    import prejit.runtime.generation.filling_aside
    import prejit.runtime.generation.finished_text
    import prejit.runtime.loader
    import prejit.runtime.programs.local
    import prejit.runtime.programs.user_programs
    import prejit.runtime.trust.enforcing  # noqa: F401
    from prejit.runtime.device import _jax_parts, _jaxlib

    _jaxlib.import_jaxlib()
    _jax_parts.import_jax()


def _sound(bundle: Path, policy: Path) -> Sound:
    draft = fuzz.draft_of(str(bundle))
    assert draft.root is not None
    found = [
        identity(manifest["config"]["digest"], [at["digest"] for at in manifest["layers"]])
        for manifest, _ in draft.targets
    ]
    has_decoder = any("decoder" in config for _, config in draft.targets)
    return Sound(str(bundle), str(policy), tuple(found), has_decoder)


def build(directory: Path) -> None:
    """Build and sign the bundles: a decoder with native kernels, and programs of a user."""
    from tests.recipes import make_example

    out = directory / "out"
    manifest = directory / "decoder.toml"
    source = ROOT / "manifests" / "demo-model"
    manifest.write_text(
        f'[bundle]\nname = "decoder"\n[model]\nsource = "{source}"\ndtype = "float32"\n'
        "[generate]\nbatch = [1]\nprompt = [16]\ncontext = [64]\n"
        '[[target]]\nname = "cpu-host"\n'
    )
    subprocess.run(
        [Path(sys.executable).with_name("prejit"), "build", manifest, "-o", out],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    make_example(directory).write(out / "example")
    sign_all([out / "decoder", out / "example"], directory / "trust.toml")


def sign_all(bundles: Sequence[Path], policy: Path) -> None:
    """Sign bundles with a new key, and write the policy that wants its signature."""
    from tests.signers import key_table, signer, write_policy

    from prejit.compiler.signing.bundle_signing import sign

    for bundle in bundles:
        sign(bundle, signer("a"))
    write_policy(policy, key_table("a"), '[[rules]]\nnames = ["*"]\nkeys = ["a"]\n')


def campaign(bundles: Sequence[Path], policy: Path, count: int) -> dict[str, Any]:
    """Try examples and return the figures."""
    outcomes, by_code, policies = Counter[tuple[str, str]](), Counter[str](), Counter[str]()
    problems: list[Tried] = []
    slowest, largest, started = 0.0, 0, time.monotonic()
    with Loads(bundles, policy) as loads:
        for number in range(count):
            tried = loads.attempt(number)
            outcomes[tried.kind, tried.outcome] += 1
            policies[tried.policy] += 1
            if tried.by_code:
                short = re.sub(r" [\d.]+ (s|MB) more", r" more \1", tried.by_code)
                by_code[f"{tried.kind}: {short}"] += 1
            elif not tried.problem:
                slowest, largest = max(slowest, tried.seconds), max(largest, tried.more_bytes)
            if tried.problem:
                problems.append(tried)
                print(f"{number} {tried.bundle} {tried.kind}: {tried.problem}", file=sys.stderr)
            if number % 250 == 249:
                print(f"{number + 1} examples, {len(problems)} bad", file=sys.stderr, flush=True)
    more: dict[str, Any] = {
        "jaxlib": version("jaxlib"),
        BY_CODE: dict(sorted(by_code.items())),
        "policy": dict(sorted(policies.items())),
    }
    return fuzz.figures_of(count, started, outcomes, problems, (slowest, largest), **more)


def main() -> int:
    """Try one example and show it, some and print their figures, or all and write the figures."""
    reader = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reader.add_argument("--bundles", type=Path, nargs="+", help="signed; else two are built")
    reader.add_argument("--policy", type=Path)
    reader.add_argument("--only", type=int)
    reader.add_argument("--keep", type=Path)
    options = reader.parse_args()
    count = int(os.environ.get("PREJIT_LOADS_EXAMPLES", "2000"))
    with tempfile.TemporaryDirectory() as directory:
        bundles, policy = options.bundles, options.policy
        if not bundles:
            command = (
                "import sys; from pathlib import Path; from tests.campaigns.loads import build"
            )
            command += "; build(Path(sys.argv[1]))"  # in a process of its own: it starts XLA
            subprocess.run([sys.executable, "-c", command, directory], check=True)
            bundles = [Path(directory, "out", name) for name in ("decoder", "example")]
            policy = Path(directory, "trust.toml")
        if options.only is not None:
            with Loads(bundles, policy) as loads:
                print(loads.attempt(options.only, keep=options.keep))
            return 0
        figures = campaign(bundles, policy, count)
    text = json.dumps(figures, indent=1) + "\n"
    if options.bundles:
        print(text)
    else:
        RESULTS.write_text(text)
    return 1 if figures["bad_count"] else 0


if __name__ == "__main__":
    sys.exit(main())
