"""A bundle that is damaged at any place gives an error that names the place, and never a wrong token.

`make damage` changes any file of a signed bundle with provenance and list of parts 20,000 times, and cuts
200 files while they are read. It writes the figures to damage.json beside this file; `make test` tries a few.
Each failure prints a command that repeats it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from . import damage as damages
from . import processes
from .campaign import ROOT, check, facts, setting, write_figures

WHOLE_EXAMPLES = 20_000
EXAMPLES = setting("DAMAGE_EXAMPLES", 20)
pytestmark = pytest.mark.timeout(900 + EXAMPLES)
CUTS = EXAMPLES // 100 or 2
"""How often a file is cut while it is read."""
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
        failures: bad outcomes, by part.
    """

    bundle: Path
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: dict[str, list[str]] = field(default_factory=dict)

    def add(self, part: str, *names: str) -> None:
        """Count an outcome."""
        self.counts.setdefault(part, Counter())[", ".join(names)] += 1

    def fail(self, part: str, number: object, problem: str) -> None:
        """Record a bad outcome."""
        again = f"PREJIT_DAMAGE_ONLY={number} .venv/bin/python -m pytest {Path(__file__).relative_to(ROOT)}"
        said = f"{part} {number}: {problem}\nrepeat it: {again} -k {part}"
        self.failures.setdefault(part, []).append(said)

    def check(self, part: str, tried: int) -> None:
        """Fail if a part had a bad outcome, or was not tried."""
        check(self.failures.get(part, []))
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
            **facts("jax", "kernel"),
            "seconds": round(time.monotonic() - started),
            "bad_outcomes": sum(map(len, made.failures.values())),
            **{part: dict(sorted(counts.items())) for part, counts in made.counts.items()},
        }
        write_figures("damage", figures)


def numbers(count: int) -> Iterable[int]:
    """Return the numbers of the examples to try."""
    return range(count) if ONLY is None else (int(ONLY),)


def test_random_damage_gives_an_error_or_the_right_tokens(
    campaign: Campaign, tmp_path: Path
) -> None:
    """Examples are tried in processes, one after the other."""
    tried, wanted = 0, [*numbers(EXAMPLES)]
    while wanted:
        batch, wanted = wanted[:AT_ONCE], wanted[AT_ONCE:]
        given = (campaign.bundle, batch)
        done = processes.run(damages.try_all, given, tmp_path, limit_seconds=20 * LIMIT_SECONDS)
        lines = done.stdout.splitlines()
        for line in lines[1::2]:
            outcome = json.loads(line)
            campaign.add("random", outcome["result"])
            for what in ("kind", "file", "mode"):
                value = outcome["role" if what == "file" else what]
                campaign.add(f"random, by {what}", value, outcome["result"])
            if outcome["problem"]:
                campaign.fail("random", outcome["number"], f"{outcome}")
        tried += len(lines) // 2
        if done.status != 0:
            last = lines[-1] if len(lines) % 2 else "none"
            campaign.fail("random", last, f"exit {done.status}\n{done.stderr[-2000:]}")
            if last == "none":
                break
            wanted = [*batch[batch.index(int(last)) + 1 :], *wanted]
    campaign.check("random", tried)


def generate(bundle: Path, tokens: int) -> subprocess.Popen[str]:
    """Start `python -m prejit.runtime generate`."""
    options = ("--prompt", damages.PROMPT, "--max-new-tokens", str(tokens), "--temperature", "0")
    command = (sys.executable, "-m", "prejit.runtime", "generate", str(bundle), *options)
    return subprocess.Popen(
        [*command, "--on-mismatch", "error"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a process. Return its status and output."""
    out, errors = process.communicate(timeout=LIMIT_SECONDS)
    return process.returncode, out, errors


def test_a_file_that_is_cut_while_it_is_read_gives_no_wrong_token(campaign: Campaign) -> None:
    """A file is cut at a random moment. After its verification only its map is read: that is a SIGBUS."""
    tokens, tried, started = 40, 0, time.monotonic()
    damages.drop_receipts()
    status, expected, errors = ended(generate(campaign.bundle, tokens))
    assert status == 0, errors
    seconds = time.monotonic() - started
    for number in numbers(CUTS):
        generator = random.Random(f"cut {number}")
        damages.drop_receipts()
        if has_receipts := number % 2 == 1:  # from before its damage
            damages.give_receipts(campaign.bundle)
        drawn = damages.draw(campaign.bundle, generator, ["cut"])
        process = generate(campaign.bundle, tokens)
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
