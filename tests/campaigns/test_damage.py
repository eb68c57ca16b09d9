"""A bundle that is damaged at any place gives an error that names the place, and never a wrong token."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from tests.manifests import write_manifest

from . import damage as damages
from . import processes
from .campaign import ROOT, Findings, facts, setting, write_figures

WHOLE_EXAMPLES = 20_000
EXAMPLES = setting("DAMAGE_EXAMPLES", 20)
pytestmark = [pytest.mark.timeout(900 + EXAMPLES), pytest.mark.thorough]
CHILDREN = EXAMPLES // 100 or 2
"""Random damages that are met by the command line; as many times a file is cut while it is read."""
ONLY = os.environ.get("PREJIT_DAMAGE_ONLY")  # the number of the one example to repeat
AT_ONCE = 250
"""Examples that one process tries. Each bundle has a client of XLA, which leaves something behind."""
LIMIT_SECONDS = 120


class Campaign(Findings):
    def __init__(self, bundle):
        super().__init__()
        self.bundle = bundle

    def fail(self, part, number, problem):
        again = f"PREJIT_DAMAGE_ONLY={number} .venv/bin/pytest tests/campaigns/test_damage.py"
        super().fail(part, f"{number}: {problem}\nrepeat it: {again} -k test_{part}")


@pytest.fixture(scope="module")
def campaign(tmp_path_factory, build_cache):
    """The demo model for two targets, in chunks of 1 MiB; and the figures at the end."""
    directory = tmp_path_factory.mktemp("damage")
    source = ROOT / "manifests" / "demo-model"
    more = {"bundle": f'license = "{source}/LICENSE"', "model": 'dtype = "float32"'}
    more |= {"context": (64,), "targets": ("cpu-host", "cpu-x86-64-v3")}
    manifest = write_manifest(directory / "demo.toml", source, name="demo", **more)
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
            "bad_outcomes": len(made.failures),
            "chunks": damages.positions(made.bundle) // 9,
            **made.figures(),
        }
        write_figures("damage", figures)


def numbers(count):
    return range(count) if ONLY is None else (int(ONLY),)


def test_positions(campaign, tmp_path):
    """A bit in each chunk: the first, the last and any byte; found early, late and meanwhile."""
    count = damages.positions(campaign.bundle)
    step = 1 if EXAMPLES >= WHOLE_EXAMPLES or ONLY is not None else 19  # of each kind of place
    try_in_workers(campaign, "positions", [*numbers(count)][::step], tmp_path, ["mode"])


def test_random(campaign, tmp_path):
    by = ["kind", "file", "mode"]
    try_in_workers(campaign, "random", [*numbers(EXAMPLES)], tmp_path, by)


def try_in_workers(campaign, part, wanted, directory, by):
    tried = 0
    while wanted:
        batch, wanted = wanted[:AT_ONCE], wanted[AT_ONCE:]
        given = (campaign.bundle, part, batch)
        done = processes.run(damages.try_all, given, directory, limit_seconds=20 * LIMIT_SECONDS)
        lines = done.stdout.splitlines()
        for outcome in map(json.loads, lines[1::2]):
            campaign.add(part, outcome["result"])
            for what in by:
                campaign.add(f"{part}, by {what}", outcome[what], outcome["result"])
            if outcome["problem"]:
                campaign.fail(part, outcome["number"], f"{outcome}")
        tried += len(lines) // 2
        if done.status != 0:
            last = lines[-1] if len(lines) % 2 else "none"
            campaign.fail(part, last, f"exit {done.status}\n{done.stderr[-2000:]}")
            if last == "none":
                break
            wanted = [*batch[batch.index(int(last)) + 1 :], *wanted]
    campaign.check(part)
    assert tried > 0


def start(command, bundle, *options):
    words = [sys.executable, "-m", "prejit.runtime", command, str(bundle), *options]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def generate(bundle, *, tokens=damages.NEW_TOKENS):
    options = ("--prompt", damages.PROMPT, "--max-new-tokens", str(tokens), "--temperature", "0")
    return start("generate", bundle, *options, "--on-mismatch", "error")


def ended(process):
    out, errors = process.communicate(timeout=LIMIT_SECONDS)
    return process.returncode, out, errors


def sound_text(campaign, tokens=damages.NEW_TOKENS):
    damages.drop_receipts()
    status, text, errors = ended(generate(campaign.bundle, tokens=tokens))
    assert status == 0, errors
    return text


def with_receipts(campaign, number):
    """Give every second example receipts from before its damage; return whether it has them."""
    damages.drop_receipts()
    if number % 2 == 1:
        damages.give_receipts(campaign.bundle)
    return number % 2 == 1


def test_command_line(campaign):
    """Half of them have receipts from before the damage, and the times of the file set back."""
    expected = sound_text(campaign)
    for number in numbers(CHILDREN):
        has_receipts = with_receipts(campaign, number)
        damage = damages.draw(campaign.bundle, random.Random(f"command {number}"))
        with damages.applied(damage, hide=has_receipts) as done:
            verified, _, said = ended(start("verify", campaign.bundle))
            status, out, errors = ended(generate(campaign.bundle))
        if verified != (0 if done.allowed == "same bytes" else 4) or "Traceback" in said:
            campaign.fail("command_line", number, f"verify: exit {verified}\n{damage.kind}\n{said}")
        if status not in (0, 4) or "Traceback" in errors:
            problem = f"exit status {status}, or a traceback"
        else:
            said = errors.removeprefix("error[reject]: ")
            rejection = (said, said.partition(": ")[0]) if status else None
            problem = damages.judged(campaign.bundle, damage, done, out, expected, rejection)
        campaign.add("command line", str(done.allowed) if status == 0 else f"exit {status}")
        if problem is not None:
            shown = f"{damage.kind}, {damage.role}, {len(done.differ)} bytes"
            campaign.fail("command_line", number, f"{problem}\n{shown}\n{out}\n{errors[-2000:]}")
    campaign.check("command_line")


def test_cut(campaign):
    """A file is cut at a random moment. After its verification only its map is read: that is a SIGBUS."""
    tokens, started = 40, time.monotonic()
    expected = sound_text(campaign, tokens)
    seconds = time.monotonic() - started
    for number in numbers(CHILDREN):
        generator = random.Random(f"cut {number}")
        has_receipts = with_receipts(campaign, number)
        drawn = damages.draw(campaign.bundle, generator, ["cut"])
        process = generate(campaign.bundle, tokens=tokens)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(generator.uniform(0, seconds))
        with damages.applied(drawn):
            status, out, errors = ended(process)
        if status == 0 and out == expected:
            result = "the right tokens"
        elif status == -signal.SIGBUS and expected.startswith(out):
            result = "SIGBUS"
        elif status in (4, 6) and "Traceback" not in errors and expected.startswith(out):
            result = f"exit {status}"
            [file] = drawn.changes
            if file.name not in errors:
                campaign.fail("cut", number, f"the error does not name {file}\n{errors}")
        else:
            result = "bad"
            campaign.fail("cut", number, f"exit {status}\n{drawn.role}\n{out}\n{errors[-2000:]}")
        campaign.add("cut", "with receipts" if has_receipts else "first load", result)
        campaign.add("cut, by file", drawn.role, result)
    campaign.check("cut")
