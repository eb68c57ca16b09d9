"""Let atheris look for inputs on which a parser fails. It is libFuzzer for Python: coverage steers it."""

import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.campaigns import fuzz
from tests.campaigns.campaign import ROOT, facts, scratch_directory, setting, write_figures
from tests.campaigns.parsers import PARSERS, changed

MOST_SECONDS = 1.0
MOST_INPUT_BYTES = 1 << 16
MOST_MEGABYTES = 2000


class FoundError(Exception):
    """A parser took too long, or its message is unfit."""


def check(parse, content):
    # Here, because `run_here` imports these modules again.
    from prejit.runtime.errors import PrejitError
    from prejit.runtime.trust.reasons import RefusedError

    started = time.process_time()
    try:
        parse(content)
    except (PrejitError, RefusedError) as error:
        if isinstance(error, PrejitError) and fuzz.is_unfit(str(error)):
            raise FoundError(f"no terminal should show {str(error)!r:.300}") from error
    seconds = time.process_time() - started
    if seconds > MOST_SECONDS:
        raise FoundError(f"{seconds:.2f} s of CPU")


def run_here(name, arguments):
    """Let libFuzzer run in this process, which it ends."""
    import atheris

    parser = PARSERS[name]
    seeds = parser.seeds()
    with atheris.instrument_imports(include=list(parser.modules)):
        for module in [m for m in sys.modules if m.startswith(parser.modules)]:
            del sys.modules[module]  # what the campaign imported before is not instrumented
        parse = parser.make()
    Path("corpus").mkdir()
    for place, seed in enumerate(seeds):
        Path("corpus", str(place)).write_bytes(seed)

    def mutate(content, most, seed):
        generator = random.Random(seed)
        if generator.random() < 0.5:
            new = changed(bytes(content), parser.form, generator)
            if new is not None and len(new) <= most:
                return new
        return bytes(atheris.Mutate(content, len(content)))

    def one(content):
        check(parse, content)

    options = [f"-max_len={MOST_INPUT_BYTES}", f"-rss_limit_mb={MOST_MEGABYTES}", "-timeout=120"]
    atheris.Setup([sys.argv[0], *options, *arguments, "corpus"], one, custom_mutator=mutate)
    atheris.Fuzz()


def run_apart(name, seconds, keep):
    """Let libFuzzer run in a process of its own, and return its figures."""
    keep.mkdir(parents=True, exist_ok=True)
    with scratch_directory() as directory:  # some parsers read files
        command = [sys.executable, "-m", "tests.campaigns.parser_fuzz", "--here", name]
        command += [f"-max_total_time={seconds}", f"-artifact_prefix={keep}/"]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": path, "PREJIT_RUNTIME_CACHE": str(directory)}
        options = {"capture_output": True, "text": True, "errors": "replace", "check": False}
        done = subprocess.run(command, cwd=directory, env=env, **options)
    said = done.stdout + done.stderr
    lines = re.findall(r"^#(\d+)\t.*cov: (\d+) ft: (\d+) corp: (\d+)", said, re.MULTILINE)
    if not lines:
        raise SystemExit(f"{name}: libFuzzer did not start:\n{said[-3000:]}")
    (_, seeds, *_), (executions, edges, _, corpus) = (map(int, lines[at]) for at in (0, -1))
    figures = {"executions": executions, "edges_of_seeds": seeds, "edges": edges}
    figures |= {"corpus": corpus, "findings": 0}
    if done.returncode:
        figures |= {"findings": 1, "said": said[-3000:]}
    return figures


def main(arguments):
    """Fuzz one parser or all, or parse one input again."""
    if arguments[:1] == ["--here"]:
        run_here(arguments[1], arguments[2:])
    if len(arguments) == 2 and arguments[1] not in PARSERS:
        content = Path(arguments[1]).read_bytes()
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            try:
                check(PARSERS[arguments[0]].make(), content)
            except Exception:
                traceback.print_exc()
                return 1
        return 0
    seconds = setting("FUZZ_SECONDS", 60)
    keep = Path(os.environ.get("PREJIT_FUZZ_KEEP", tempfile.mkdtemp(prefix="parser-fuzz-")))
    found = {}
    for name in arguments or PARSERS:
        found[name] = run_apart(name, seconds, keep / name.replace(" ", "-"))
        shown = {key: value for key, value in found[name].items() if key != "said"}
        print(f"{name}: {shown}", flush=True)
        if "said" in found[name]:
            print(f"{found[name]['said']}\ninputs: {keep}", flush=True)
    bad = sum(each["findings"] for each in found.values())
    if not arguments:
        figures = {
            **facts("atheris"),
            "seconds_each": seconds,
            "executions": sum(each["executions"] for each in found.values()),
            "findings": bad,
            "parsers": found,
        }
        write_figures("parsers", figures)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
