"""A bundle that is damaged at any place gives an error that names the place, and never a wrong token.

`make damage` changes any file of a signed bundle with provenance and list of parts, 20,000 times by the
checks and 200 times by the command line, and cuts 200 files while they are read. It writes the figures to
damage.json beside this file; `make test` tries a few. Each failure prints a command that repeats it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest

from . import damage as damages
from . import processes

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("damage.json")
WHOLE_EXAMPLES = 20_000
EXAMPLES = int(os.environ.get("PREJIT_DAMAGE_EXAMPLES", "20"))
pytestmark = pytest.mark.timeout(900 + EXAMPLES)
CHILDREN = EXAMPLES // 100 or 2
"""Random damages that are met by the command line; as many times a file is cut while it is read."""
ONLY = os.environ.get("PREJIT_DAMAGE_ONLY")
"""The number of the one example to repeat."""
AT_ONCE = 250
"""Examples that one process tries. Each bundle has a client of XLA, which leaves something behind."""
LIMIT_SECONDS = 120


@dataclass
class Campaign:
    """A sound bundle, and what became of the damaged ones.

    Attributes:
        bundle: the bundle.
        counts: of outcomes, by part of the campaign, and what they are counted by.
        failures: bad outcomes.
    """

    bundle: Path
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, part: str, *names: str) -> None:
        """Count an outcome."""
        self.counts.setdefault(part, Counter())[", ".join(names)] += 1

    def fail(self, part: str, number: object, problem: str) -> None:
        """Record a bad outcome."""
        again = f"PREJIT_DAMAGE_ONLY={number} .venv/bin/python -m pytest {Path(__file__).relative_to(ROOT)}"
        self.failures.append(f"{part} {number}: {problem}\nrepeat it: {again} -k test_{part}")

    def check(self, part: str, tried: int) -> None:
        """Fail if a part had a bad outcome, or was not tried."""
        found = [each for each in self.failures if each.startswith(f"{part} ")]
        assert not found, f"{len(found)} bad outcomes\n\n" + "\n\n".join(found[:20])
        assert tried > 0


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory, build_cache: Path) -> Iterator[Campaign]:
    """The demo model for two targets, in chunks of 1 MiB; and the figures at the end."""
    directory = tmp_path_factory.mktemp("damage")
    source = ROOT / "manifests" / "demo-model"
    manifest = directory / "demo.toml"
    manifest.write_text(
        f'[bundle]\nname = "demo"\nlicense = "{source}/LICENSE"\n'
        f'[model]\nsource = "{source}"\ndtype = "float32"\n'
        "[generate]\nbatch = [1]\nprompt = [16]\ncontext = [64]\n"
        '[[target]]\nname = "cpu-host"\n[[target]]\nname = "cpu-x86-64-v2"\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))  # the fork server imports this module by its name
        patch.setenv("PREJIT_RUNTIME_CACHE", str(directory / "runtime-cache"))
        arguments = (str(manifest), str(directory / "out"), str(build_cache))
        built = processes.run(damages.build, arguments, directory, limit_seconds=600)
        assert built.status == 0, built.stderr
        made = Campaign(directory / "out" / "demo")
        damages.files(made.bundle)
    started = time.monotonic()
    yield made
    if EXAMPLES >= WHOLE_EXAMPLES and ONLY is None:
        figures = {
            "date": str(date.today()),
            "python": platform.python_version(),
            "jax": version("jax"),
            "kernel": platform.release(),
            "seconds": round(time.monotonic() - started),
            "bad_outcomes": len(made.failures),
            "chunks": damages.positions(made.bundle) // 9,
            **{part: dict(sorted(counts.items())) for part, counts in made.counts.items()},
        }
        RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


def numbers(count: int) -> Iterable[int]:
    """Return the numbers of the examples to try."""
    return range(count) if ONLY is None else (int(ONLY),)


def test_positions(campaign: Campaign) -> None:
    """A bit in each chunk: the first, the last and any byte; found early, late and meanwhile."""
    count = damages.positions(campaign.bundle)
    step = 1 if EXAMPLES >= WHOLE_EXAMPLES or ONLY is not None else 9
    tried = try_in_workers(campaign, "positions", [*numbers(count)][::step])
    campaign.check("positions", tried)


def test_random(campaign: Campaign) -> None:
    campaign.check("random", try_in_workers(campaign, "random", [*numbers(EXAMPLES)]))


def try_in_workers(campaign: Campaign, part: str, wanted: list[int]) -> int:
    """Try examples in processes, one after the other. Return how many were tried."""
    tried = 0
    while wanted:
        batch, wanted = wanted[:AT_ONCE], wanted[AT_ONCE:]
        command = (sys.executable, "-m", damages.__name__, campaign.bundle, part, *batch)
        done = subprocess.run(
            [*map(str, command)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=20 * LIMIT_SECONDS,
            check=False,
        )
        lines = done.stdout.splitlines()
        for line in lines[1::2]:
            outcome = damages.Outcome(**json.loads(line))
            campaign.add(part, outcome.result)
            if part == "random":
                campaign.add("random, by kind", outcome.kind, outcome.result)
                campaign.add("random, by file", outcome.role, outcome.result)
            campaign.add(f"{part}, by mode", outcome.mode, outcome.result)
            if outcome.problem:
                campaign.fail(part, outcome.number, f"{outcome}")
        tried += len(lines) // 2
        if done.returncode != 0:
            last = lines[-1] if len(lines) % 2 else "none"
            campaign.fail(part, last, f"exit {done.returncode}\n{done.stderr[-2000:]}")
            if last == "none":
                break
            wanted = [*batch[batch.index(int(last)) + 1 :], *wanted]
    return tried


def generate(bundle: Path, *, tokens: int = damages.NEW_TOKENS) -> subprocess.Popen[str]:
    """Start `python -m prejit.runtime generate`."""
    options = ("--prompt", damages.PROMPT, "--max-new-tokens", str(tokens), "--temperature", "0")
    return start("generate", bundle, *options, "--on-mismatch", "error")


def start(command: str, bundle: Path, *options: str) -> subprocess.Popen[str]:
    """Start a command of `python -m prejit.runtime`."""
    return subprocess.Popen(
        [sys.executable, "-m", "prejit.runtime", command, str(bundle), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a process. Return its status and output."""
    out, errors = process.communicate(timeout=LIMIT_SECONDS)
    return process.returncode, out, errors


def test_command_line(campaign: Campaign) -> None:
    """Half of them have receipts from before the damage, and the times of the file set back."""
    damages.drop_receipts()
    status, expected, errors = ended(generate(campaign.bundle))
    assert status == 0, errors
    tried = 0
    for number in numbers(CHILDREN):
        damages.drop_receipts()
        if has_receipts := number % 2 == 1:
            damages.give_receipts(campaign.bundle)
        damage = damages.draw(campaign.bundle, random.Random(f"command {number}"))
        before = 0 if damage.kind == "added" else damage.file.stat().st_size
        with damages.applied(damage, hide=has_receipts) as differ:
            verified, _, said = ended(start("verify", campaign.bundle))
            status, out, errors = ended(generate(campaign.bundle))
        allowed = damages.may_pass(damage, differ, before)
        problem = None
        if verified != (0 if allowed == "same bytes" else 4) or "Traceback" in said:
            campaign.fail("command_line", number, f"verify: exit {verified}\n{damage}\n{said}")
        if status == 0:
            problem = None if out == expected and allowed is not None else "not rejected"
        elif status != 4:
            problem = f"exit status {status}"
        elif "Traceback" in errors:
            problem = "a traceback"
        elif not expected.startswith(out) or out == expected:
            problem = f"wrong text: expected {expected!r}, found {out!r}"
        elif allowed == "same bytes":
            problem = "rejected without damage"
        elif not {*damage.roles} & {*damages.LENIENT}:
            said = errors.removeprefix("error[reject]: ")
            problem = damages.misleading(
                damage, differ, campaign.bundle, said, said.partition(": ")[0]
            )
        campaign.add("command line", str(allowed) if status == 0 else f"exit {status}")
        if problem is not None:
            shown = f"{damage.kind}, {damage.role}, {len(differ)} bytes"
            campaign.fail("command_line", number, f"{problem}\n{shown}\n{out}\n{errors[-2000:]}")
        tried += 1
    campaign.check("command_line", tried)


def test_cut(campaign: Campaign) -> None:
    """A file is cut at a random moment. After its verification only its map is read: that is a SIGBUS."""
    tokens = 40
    damages.drop_receipts()
    started = time.monotonic()
    status, expected, errors = ended(generate(campaign.bundle, tokens=tokens))
    assert status == 0, errors
    seconds = time.monotonic() - started
    tried = 0
    for number in numbers(CHILDREN):
        generator = random.Random(f"cut {number}")
        damages.drop_receipts()
        if has_receipts := number % 2 == 1:
            damages.give_receipts(campaign.bundle)
        drawn = damages.draw(campaign.bundle, generator, ["cut"])
        process = generate(campaign.bundle, tokens=tokens)
        delay = generator.uniform(0, seconds)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay)
        with damages.applied(drawn):
            status, out, errors = ended(process)
        if status == 0 and out == expected:
            result = "the right tokens"
        elif status == -signal.SIGBUS and expected.startswith(out):
            result = "SIGBUS"
        elif status in (4, 6) and "Traceback" not in errors and expected.startswith(out):
            result = f"exit {status}"
            if drawn.file.name not in errors:
                campaign.fail("cut", number, f"the error does not name {drawn.file}\n{errors}")
        else:
            result = "bad"
            campaign.fail("cut", number, f"exit {status}\n{drawn.role}\n{out}\n{errors[-2000:]}")
        campaign.add("cut", "with receipts" if has_receipts else "first load", result)
        campaign.add("cut, by file", drawn.role, result)
        tried += 1
    campaign.check("cut", tried)
