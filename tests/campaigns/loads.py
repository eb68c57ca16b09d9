"""Hostile bundles through the full loader: each in a child process that loads and runs it."""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import zstandard

from prejit.runtime.device.kernels import kernels_of
from prejit.runtime.format.names import kernel_target

from . import forged_bundles, fuzz, processes
from .campaign import ROOT, setting, write_figures
from .junk import damaged

CPU_SECONDS = 20
WALL_SECONDS = 120
MEMORY_BYTES = 6 << 30
BY_CODE = "by bytes of code that a policy refuses"
PRELOADED = (
    *("jax", "jaxlib.xla_client", "prejit.runtime.bundle", "prejit.runtime.bundle_batches"),
    *("prejit.runtime.device.kernels", "prejit.runtime.device.portable", "prejit.runtime.loader"),
    *("prejit.runtime.format.blob_hashing", "prejit.runtime.generation.cache_growth"),
    *("prejit.runtime.generation.decode", "prejit.runtime.generation.filling_aside"),
    *("prejit.runtime.generation.finished_text", "prejit.runtime.programs.local_compiler"),
    *("prejit.runtime.programs.user_programs", "prejit.runtime.trust.enforcing"),
    "tests.campaigns.loads",
)
"""The modules that a load imports, without a client of XLA, and those that this module imports."""


def _repacked(draft, place, key, change):
    """Write a pack of a target again with changed programs, and set all digests right."""
    manifest, config = draft.targets[place]
    layer = forged_bundles.pack_of(manifest, config, config["programs"][0][key])
    content, pack = draft.blobs[layer["digest"]], b""
    written = {}
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
            **forged_bundles.described(frame),
            "raw_size": len(new),
            "raw_digest": forged_bundles.digest_of(new),
        }
    forged_bundles.put(draft, config, layer, pack)


def _program_bytes(draft, generator, key):
    place = generator.randrange(len(draft.targets))
    chosen = generator.choice(draft.targets[place][1]["programs"])["name"]

    def change(name, raw):
        return damaged(raw, generator) if name == chosen else raw

    _repacked(draft, place, key, change)


def _kernel_bytes(draft, generator):
    """Change the bytes of the kernels. Executables call them by their digest, so bind these again."""
    place = generator.randrange(len(draft.targets))
    manifest, config = draft.targets[place]
    layers = [at for at in manifest["layers"] if "kernels" in at["mediaType"]]
    if not layers:
        _program_bytes(draft, generator, "executable")
        return
    old, before = layers[0]["digest"], draft.blobs[layers[0]["digest"]]
    content = damaged(before, generator)
    forged_bundles.put(draft, config, layers[0], content)
    new = forged_bundles.digest_of(content)
    kernels = [*kernels_of(before)]

    def rebind(_, raw):
        for name in kernels:
            one, other = (kernel_target(name, digest).encode() for digest in (old, new))
            raw = raw.replace(one, other)
        return raw

    _repacked(draft, place, "executable", rebind)


def _programs_exchanged(draft, generator):
    _, config = generator.choice(draft.targets)
    one, other = generator.choice(config["programs"]), generator.choice(config["programs"])
    one["executable"], other["executable"] = other["executable"], one["executable"]


CODE = {
    "executable bytes": partial(_program_bytes, key="executable"),
    "portable bytes": partial(_program_bytes, key="portable"),
    "kernel bytes": _kernel_bytes,
    "programs exchanged": _programs_exchanged,
}


def changed(name, generator):
    chosen = generator.random()
    if chosen < 0.25:
        return forged_bundles.damaged(name, generator)
    if chosen < 0.6:
        return forged_bundles.attacked(name, generator)
    draft, kind = forged_bundles.draft_of(name), generator.choice([*CODE])
    CODE[kind](draft, generator)
    return kind, draft.files()


def code_of(files):
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


def identity(config, layers):
    return hashlib.sha256(json.dumps([config, sorted(layers)]).encode()).hexdigest()


def answer_of(bundle):
    """Run what a bundle can do, and return the answers as text."""
    said = []
    if bundle.config.decoder is not None:
        result = bundle.generate([1, 2, 3], max_new_tokens=4, stop_token_ids=(), temperature=0)
        said.append(result.token_ids)
    for program in bundle.config.programs:
        if program.kind == "call":
            result = bundle.runner_with_zeros(program)()
            said.append([program.name, result.tobytes().hex()])
    return json.dumps(said)


def _load(path, *, falls_back, trust=None):
    from prejit.runtime import Fingerprint, load

    if not falls_back:
        return load(path, on_mismatch="error", trust=trust)
    other = replace(Fingerprint.current(), jaxlib="0.0.1")
    return load(path, on_mismatch="jit", fingerprint=other, trust=trust)


def use(given):
    """Ask the policy, then load the bundle and run it, in little memory. Print each step as JSON."""
    from prejit.runtime.base.files import digest_of
    from prejit.runtime.base.typed_json import to_json
    from prejit.runtime.errors import PrejitError

    path, sound, falls_back = given
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    warnings.simplefilter("ignore")
    try:
        with _load(path, falls_back=falls_back, trust=sound.policy) as bundle:
            parts = bundle._open
            layers = [layer.digest for layer in parts.layers.values()]
            found = identity(digest_of(to_json(bundle.config)), layers)
            policy = "allowed" if found in sound.identities else "allowed what is not signed"
    except PrejitError as error:
        policy = type(error).__name__
    print(json.dumps({"policy": policy}), flush=True)
    Path("/proc/self/clear_refs").write_text("5")
    before, started = fuzz.memory_of("VmRSS"), time.process_time()
    try:
        with _load(path, falls_back=falls_back) as bundle:
            bundle.prepare()
            text = answer_of(bundle)
        outcome = "right" if text == sound.answer else "another answer"
    except PrejitError as error:
        outcome, text = type(error).__name__, str(error)
    except Exception as error:
        outcome, text = f"traceback: {type(error).__name__}", traceback.format_exc()
    seconds = time.process_time() - started
    more_bytes = fuzz.memory_of("VmHWM") - before
    said = {"outcome": outcome, "text": text[:5000], "seconds": seconds, "more_bytes": more_bytes}
    print(json.dumps(said), flush=True)
    return 0


def use_apart(path, sound, *, falls_back, directory):
    """Return what a child process reports, under `stderr` what it prints, and under `ended` how it ended."""
    ended = processes.run(use, (path, sound, falls_back), directory, limit_seconds=WALL_SECONDS)
    found = {"stderr": ended.stderr}
    for line in ended.stdout.splitlines():
        with contextlib.suppress(ValueError, TypeError):  # XLA writes there, too
            found |= json.loads(line)
    if ended.status in (None, -signal.SIGXCPU, -signal.SIGKILL):
        found["ended"] = "hang"
    elif ended.status == processes.UNEXPECTED:
        found |= {"outcome": "traceback: of the campaign", "text": ended.stderr[-5000:]}
    elif ended.status < 0:
        found["ended"] = signal.Signals(-ended.status).name
    elif "outcome" not in found:
        found["ended"] = f"status {ended.status}"
    return found


@dataclass
class Tried(fuzz.Tried):
    """Also what the policy said, and an end, time or memory that bytes of code explain."""

    policy: str
    by_code: str


class Loads(fuzz.Examples):
    def __init__(self, bundles, policy):
        super().__init__()
        self._sound, self._usual = [], {}
        for bundle in bundles:
            draft = forged_bundles.draft_of(str(bundle))
            found = tuple(
                identity(manifest["config"]["digest"], [at["digest"] for at in manifest["layers"]])
                for manifest, _ in draft.targets
            )
            has_decoder = any("decoder" in config for _, config in draft.targets)
            sound = SimpleNamespace(
                name=str(bundle), policy=str(policy), identities=found, answer=""
            )
            sound.answer = self._measure(sound, False)[2]
            self._sound.append(sound)
            sound.has_decoder = has_decoder  # which takes too long to compile in a fallback
            for falls_back in (False,) if has_decoder else (False, True):
                self._usual[sound.name, falls_back] = self._measure(sound, falls_back)[:2]

    def _measure(self, sound, falls_back):
        """Return CPU time and memory of a sound bundle, and its answer."""
        path = self.write(sound.name, forged_bundles.sound(sound.name))
        tries = [self._use(path, sound, falls_back) for _ in range(3)]
        for said in tries:
            assert said.get("outcome") in ("right", "another answer"), (sound.name, said)
            assert said["policy"] == "allowed", (sound.name, said)
        seconds, more = (max(said[key] for said in tries) for key in ("seconds", "more_bytes"))
        return seconds, more, tries[0]["text"]

    def _use(self, path, sound, falls_back):
        shutil.rmtree(self.cache, ignore_errors=True)
        return use_apart(path, sound, falls_back=falls_back, directory=self.directory)

    def attempt(self, number, *, keep=None):
        """Try one example; keep: write its files into this directory, and show what its process prints."""
        generator = random.Random(number)
        sound = generator.choice(self._sound)
        kind, files = changed(sound.name, generator)
        falls_back = kind == "portable bytes" and not sound.has_decoder
        path = self.write(sound.name, files)
        said = self._use(path, sound, falls_back)
        if keep is not None:
            shutil.copytree(path, keep)
            print(said.pop("stderr"), json.dumps(said, indent=1))
        usual_seconds, usual_bytes = self._usual[sound.name, falls_back]
        allowed = fuzz.allowed_seconds(sound.name, files)
        for _ in range(4):  # other processes may have had the CPU
            if said.get("seconds", 0.0) - usual_seconds > allowed:
                again = self._use(path, sound, falls_back)
                said = min(said, again, key=lambda each: each.get("seconds", 0.0))
        seconds = said.get("seconds", 0.0) - usual_seconds
        more_bytes = said.get("more_bytes", 0) - usual_bytes
        excess = fuzz.beyond(seconds, allowed, more_bytes)
        excess = f"ended: {said['ended']}" if "ended" in said else excess and f"took {excess}"
        of_code = code_of(files) != code_of(forged_bundles.sound(sound.name))
        by_code, problem = judged(said, excess, sound.answer, kind=kind, of_code=of_code)
        name, policy = Path(sound.name).name, said.get("policy", "no answer")
        outcome = said.get("ended") or said["outcome"]
        return Tried(number, name, kind, outcome, problem, seconds, more_bytes, policy, by_code)


def judged(said, excess, answer, *, kind, of_code):
    """Return what is there because of bytes of code, and what is bad; empty: nothing."""
    policy, outcome = said.get("policy", "no answer"), said.get("ended") or said["outcome"]
    text = said.get("text", "")
    of_attacker = kind in CODE or kind in forged_bundles.ATTACKS  # all digests are right
    if policy in ("allowed what is not signed", "no answer"):
        return "", f"the policy: {policy}"
    if outcome.startswith("traceback"):
        return "", text
    if excess:
        refused = policy in ("UntrustedError", "RejectError")
        return (excess, "") if of_code and refused else ("", excess)
    if outcome == "another answer" and (policy == "allowed" or not of_attacker):
        return "", f"expected {answer:.200}, found {text:.200}"
    if outcome not in ("right", "another answer") and fuzz.is_unfit(text):
        return "", f"an error that no terminal should show: {text!r:.300}"
    return "", ""


def build(directory):
    """Build and sign the bundles: a decoder with native kernels, and programs of a user."""
    from tests.manifests import write_manifest
    from tests.recipes import make_example

    directory = Path(directory)
    out, manifest = directory / "out", directory / "decoder.toml"
    source = ROOT / "manifests" / "demo-model"
    write_manifest(manifest, source, name="decoder", model='dtype = "float32"', context=(64,))
    command = [Path(sys.executable).with_name("prejit"), "build", manifest, "-o", out]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    make_example(directory).write(out / "example")
    sign_all([out / "decoder", out / "example"], directory / "trust.toml")


def sign_all(bundles, policy):
    """Sign bundles with a new key, and write the policy that wants its signature."""
    from tests.signers import key_table, signer, write_policy

    from prejit.compiler.signing.bundle_signing import sign

    for bundle in bundles:
        sign(bundle, signer("a"))
    write_policy(policy, key_table("a"), '[[rules]]\nnames = ["*"]\nkeys = ["a"]\n')


def figures_of(bundles, policy, count):
    started = time.monotonic()
    with Loads(bundles, policy) as loads:
        found = fuzz.try_all(loads.attempt, count, 250)
    by_code = Counter()
    for tried in (each for each in found if each.by_code):
        short = re.sub(r" [0-9.]+ (s|MB) more", r" more \1", tried.by_code)
        by_code[f"{tried.kind}: {short}"] += 1
    more = {BY_CODE: by_code, "policy": Counter(tried.policy for tried in found)}
    more = {name: dict(sorted(counts.items())) for name, counts in more.items()}
    usual = [tried for tried in found if not tried.by_code and not tried.problem]
    return fuzz.figures_of(found, started, "jaxlib", usual=usual, **more)


def main():
    """Try one example and show it, some and print their figures, or all and write the figures."""
    reader = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reader.add_argument("--bundles", type=Path, nargs="+", help="signed; else two are built")
    reader.add_argument("--policy", type=Path)
    reader.add_argument("--only", type=int)
    reader.add_argument("--keep", type=Path)
    options = reader.parse_args()
    processes.PRELOADED = PRELOADED
    with tempfile.TemporaryDirectory() as directory:
        bundles, policy = options.bundles, options.policy
        if not bundles:
            building = multiprocessing.get_context("spawn").Process(target=build, args=[directory])
            building.start()  # in a process of its own: it starts XLA
            building.join()
            assert building.exitcode == 0
            bundles = [Path(directory, "out", name) for name in ("decoder", "example")]
            policy = Path(directory, "trust.toml")
        if options.only is not None:
            with Loads(bundles, policy) as loads:
                print(loads.attempt(options.only, keep=options.keep))
            return 0
        figures = figures_of(bundles, policy, setting("LOADS_EXAMPLES", 2000))
    if options.bundles:
        print(json.dumps(figures, indent=1))
    else:
        write_figures("loads", figures)
    return min(1, figures["bad_count"])


if __name__ == "__main__":
    sys.exit(main())
