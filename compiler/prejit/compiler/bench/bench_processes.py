"""Measure start-up and memory in fresh processes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from prejit.compiler.bench.probes import NEW_TOKENS, PROMPTS, random_prompt
from prejit.compiler.bench.rounds import Head, Rounds, Say
from prejit.runtime.base.child_process import run_child
from prejit.runtime.bundle import Bundle
from prejit.runtime.errors import ProcessError
from prejit.runtime.loader import load
from prejit.runtime.machine.fingerprint import Fingerprint


@dataclass(frozen=True, slots=True)
class Setup:
    """How to load a bundle, in this process and in fresh ones.

    Attributes:
        path: the directory of the bundle.
        on_mismatch: see `prejit.runtime.load`.
        fingerprint: a file with a fingerprint to use instead of this machine's; None: this machine's.
    """

    path: str
    on_mismatch: Literal["jit", "error"] = "jit"
    fingerprint: str | None = None

    def load(self) -> Bundle:
        """Load the bundle. Raises the errors of `prejit.runtime.load`."""
        return load(
            self.path,
            on_mismatch=self.on_mismatch,
            fingerprint=Fingerprint.read(self.fingerprint) if self.fingerprint else None,
        )


def measure_fresh_processes(
    setups: Sequence[Setup], bundles: Sequence[Bundle], runs: int, say: Say
) -> list[Rounds]:
    """Return start-up times and memory of `runs` processes, after one process that warms the caches."""
    uses = [_use_once(bundle) for bundle in bundles]
    found: list[Rounds] = [{} for _ in setups]
    for number in range(runs + 1):
        say(f"start-up: fresh process {number + 1} of {runs + 1}")
        sides = list(range(len(setups)))
        for side in sides if number % 2 else sides[::-1]:
            what, use = uses[side]
            facts = _fresh_process(setups[side], use)
            for fact, head in fresh_heads(what).items():
                if number and facts[fact] is not None:
                    found[side].setdefault(head, []).append([facts[fact]])
    return found


def fresh_heads(what: str) -> dict[str, Head]:
    """Return the row of each value that a fresh process reports."""
    return {
        "first_seconds": Head("start-up", "exec to first result", what),
        "load_seconds": Head("start-up", "load", what),
        "peak_bytes": Head("memory", "peak RSS", what, "bytes"),
        "private_bytes": Head("memory", "private", what, "bytes"),
        "device_bytes": Head("memory", "device", what, "bytes"),
    }


def _use_once(bundle: Bundle) -> tuple[str, dict[str, Any]]:
    """Return what a fresh process does: as text, and as arguments of `child.use_once`."""
    if bundle.config.decoder is not None:
        decoder = bundle.decoder
        length = max(1, min(PROMPTS[0], decoder.contexts[-1] // 2))
        new_tokens = min(NEW_TOKENS, decoder.contexts[-1] - length)
        prompt = random_prompt(length, decoder.decoder.vocab_size, 0)
        what = f"a prompt of {length} tokens; {new_tokens} new ones"
        return what, {"program": None, "prompt": prompt, "new_tokens": new_tokens}
    if bundle.config.encoder is not None:
        length = min(PROMPTS[0], bundle.encoder.max_tokens)
        sentence = random_prompt(length, bundle.encoder.encoder.vocab_size, 0)
        what = f"a sentence of {length} tokens"
        return what, {"program": None, "prompt": sentence, "new_tokens": 0}
    programs = [program for program in bundle.config.programs if program.kind == "call"]
    smallest = min(programs, key=lambda program: math.prod(program.bucket.values()))
    what = f"{smallest.name} on zeros"
    return what, {"program": smallest.name, "prompt": [], "new_tokens": 0}


def _fresh_process(setup: Setup, use: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a fresh process reports.

    Raises:
        ProcessError: the process failed.
    """
    given = json.dumps({**asdict(setup), **use})
    command = [sys.executable, "-m", "prejit.compiler.bench.bench_child", given]
    code, output, errors = run_child(command)
    if code:
        raise ProcessError(
            f"{setup.path}: a fresh process ended with {code}: {errors[-500:].strip()}",
            code,
            hint="`prejit generate` or `prejit call` on this bundle may say more",
        )
    facts: dict[str, Any] = json.loads(output.splitlines()[-1])
    return facts
