"""Hostile bundles: each is rejected with an error of prejit's, or is right; soon, in little memory."""

import contextlib
import dataclasses
import gc
import os
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from prejit.runtime.errors import PrejitError, RejectError

from .campaign import facts, scratch_directory, setting, write_figures
from .forged_bundles import BUNDLES, attacked, damaged, sound

LOADED = ("decoder", "encoder", "chunks", "reader")
"""Bundles of one target without kernels: a load reads all that `prejit verify` reads."""
MOST_SECONDS = 0.2
MOST_BYTES = 64 << 20
SECONDS_PER_BYTE = 5e-8
"""The CPU time that it may take for each byte that it has beyond the sound bundle: JSON takes as long."""


def read_as_loads_do(path):
    """Load a bundle, and read all that programs, text and generation may read later. Runs nothing."""
    from prejit.runtime import load
    from prejit.runtime.format.names import EXECUTABLES_MEDIA_TYPE, PORTABLE_MEDIA_TYPE

    no_device = mock.Mock(return_value=SimpleNamespace(in_cluster=False))
    with warnings.catch_warnings(), mock.patch("prejit.runtime.loaded_bundle.Device", no_device):
        warnings.simplefilter("ignore")
        loaded = load(path)
    parts = loaded._open
    try:
        parts.programs.verification.finish()
        programs, layers = parts.programs, parts.layers
        for name, program in programs.table.items():
            layers[EXECUTABLES_MEDIA_TYPE].unpack(program.executable)
            layers[PORTABLE_MEDIA_TYPE].unpack(program.portable)
            if program.symbolic is not None:
                layers[PORTABLE_MEDIA_TYPE].unpack(program.symbolic)
            programs.arguments(name)
            programs.results(name)
            programs.static(name)
            if program.kind == "call":
                programs.arguments_tree(name)
                programs.results_tree(name)
        if parts.text.has_chat_template:
            _ = parts.text.chat
        if loaded.config.decoder is not None:
            _ = loaded.defaults
    finally:
        parts.programs.verification.stop(RuntimeError("the example is over"))


@dataclass
class Tried:
    """An example and its outcome; CPU time and memory are those beyond the sound bundle's."""

    number: int
    bundle: str
    kind: str
    outcome: str
    problem: str
    seconds: float
    more_bytes: int


class Examples(contextlib.ExitStack):
    """Writes one bundle after the other into a directory in memory. Use it in a `with` statement."""

    def __init__(self):
        super().__init__()
        self.directory = self.enter_context(scratch_directory())
        self.cache = self.directory / "cache"
        variables = {"PREJIT_RUNTIME_CACHE": str(self.cache)}
        self.enter_context(mock.patch.dict(os.environ, variables))
        self._written = {}

    def write(self, name, files):
        """Make a directory hold these files: write what differs from the ones before. Return its path."""
        path = self.directory / Path(name).name
        written = self._written.setdefault(path, {})
        (path / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        for file in written.keys() - files.keys():
            (path / file).unlink()
        for file, content in files.items():
            if written.get(file) != content:
                (path / file).write_bytes(content)
        self._written[path] = dict(files)
        return path


def allowed_seconds(name, files):
    """Return the CPU time that changed files of a bundle may take beyond that of the sound ones."""
    more = sum(map(len, files.values())) - sum(map(len, sound(name).values()))
    return MOST_SECONDS + SECONDS_PER_BYTE * max(0, more)


def beyond(seconds, allowed, more_bytes):
    """Return what an example takes too much of; empty: nothing."""
    if seconds > allowed:
        return f"{seconds:.2f} s more than the sound bundle"
    return f"{more_bytes >> 20} MB more than the sound bundle" if more_bytes > MOST_BYTES else ""


class Fuzzer(Examples):
    def __init__(self):
        super().__init__()
        self._usual = {}

    def attempt(self, number, *, show=False):
        """Try one example; show: print the traceback of an error."""
        generator = random.Random(number)
        name = generator.choice(BUNDLES)
        make = damaged if generator.random() < 0.4 else attacked
        kind, files = make(name, generator)
        usual_seconds, usual_bytes = self._usual_of(name)
        path = self.write(name, files)
        error, seconds, more = self._verified(path)
        allowed = allowed_seconds(name, files)
        for _ in range(3):  # other processes may have had the CPU's caches
            if seconds - usual_seconds > allowed:
                error, seconds, more = self._verified(path)
        if show and error is not None:
            traceback.print_exception(error)
        seconds, more = seconds - usual_seconds, more - usual_bytes
        if error is not None and not isinstance(error, RejectError):
            problem = f"expected a RejectError, found {error!r:.300}"
        elif error is not None and is_unfit(str(error)):
            problem = f"an error that no terminal should show: {str(error)!r:.300}"
        else:
            problem = beyond(seconds, allowed, more)
            if not problem and name in LOADED:
                problem = _differs(path, error, show)
        outcome = "accepted" if error is None else "rejected"
        return Tried(number, name, kind, outcome, problem, seconds, more)

    def _usual_of(self, name):
        if name not in self._usual:
            path = self.write(name, sound(name))
            tries = [self._verified(path) for _ in range(4)]
            assert all(error is None for error, _, _ in tries), (name, tries)
            self._usual[name] = max(t[1] for t in tries[1:]), max(t[2] for t in tries[1:])
        return self._usual[name]

    def _verified(self, path):
        from prejit.runtime.format.audit import audit
        from prejit.runtime.generation.options import check_generation

        Path("/proc/self/clear_refs").write_text("5")
        before, started = memory_of("VmRSS"), time.process_time()
        try:
            audit(path, check_generation)
            error = None
        except Exception as raised:
            error = raised
        seconds = time.process_time() - started
        return error, seconds, memory_of("VmHWM") - before


def memory_of(name):
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def is_unfit(message):
    bad = re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", message)
    return bad is not None or len(message) > 4000


def _differs(path, error, show):
    """Return how a load differs from `prejit verify`; empty: it does not."""
    try:
        read_as_loads_do(path)
        of_load = None
    except PrejitError as raised:
        of_load = raised
    except Exception as raised:
        if show:
            traceback.print_exception(raised)
        return f"a load raised {raised!r:.300}"
    if (error is None) != (of_load is None):
        return f"verify: {error!r:.300}; load: {of_load!r:.300}"
    return ""


def try_all(attempt, count, every):
    """Try so many examples, and print the bad ones and, after each `every`, how far it is."""
    found = []
    for number in range(count):
        tried = attempt(number)
        found.append(tried)
        if tried.problem:
            print(f"{number} {tried.bundle} {tried.kind}: {tried.problem}", file=sys.stderr)
        if number % 100 == 99:
            gc.collect()  # bundles that were refused have files open until then
        if number % every == every - 1:
            bad = sum(bool(each.problem) for each in found)
            print(f"{number + 1} examples, {bad} bad", file=sys.stderr, flush=True)
    return found


def figures_of(found, started, *packages, usual, **more):
    """Return the figures of a campaign; the time and the memory of `usual` examples count."""
    problems = [each for each in found if each.problem]
    by_kind = {}
    for (kind, outcome), count in sorted(Counter((t.kind, t.outcome) for t in found).items()):
        by_kind.setdefault(kind, {})[outcome] = count
    seconds = max((each.seconds for each in usual), default=0.0)
    most_bytes = max((each.more_bytes for each in usual), default=0)
    return {
        **facts(*packages),
        "examples": len(found),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "bad": [dataclasses.asdict(each) for each in problems[:20]],
        "bad_count": len(problems),
        **more,
        "most_seconds_beyond_a_sound_bundle": round(max(0.0, seconds), 3),
        "most_megabytes_beyond_a_sound_bundle": round(max(0, most_bytes) / 2**20, 1),
        "outcomes": by_kind,
    }


def main(numbers):
    """Try some examples and show them, or as many as the environment says and write the figures."""
    started = time.monotonic()
    with Fuzzer() as fuzzer:
        if numbers:
            for number in numbers:
                print(fuzzer.attempt(int(number), show=True))
            return 0
        found = try_all(fuzzer.attempt, setting("FUZZ_EXAMPLES", 100_000), 5000)
    figures = figures_of(found, started, usual=found)
    write_figures("fuzz", figures)
    return min(1, figures["bad_count"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
