"""Measure `prejit serve` beside llama.cpp's server and the engine, which is beside OpenVINO's batching.

    python -m benchmarks.studies.serving_peers [--rounds 2] [--models gpt2-float32,gpt2-int8,llama-1b-int8]
        [--systems PART,PART] [--clients 1,4,8,16] [--tokens N] [--prompts 32-900]

    --systems prejit      what HTTP costs: the server beside the engine
    --prompts 32-900      bursts of prompts of many lengths, to 1,900; other pages
    --prompts 1000+32-900 the same with 1,000 tokens before each that all share, as a system prompt;
                          here each system reuses what it keeps

Writes benchmarks/results/. All have the same weights, and get the same requests: prompts of
32 tokens, greedy, a fixed number of new tokens, no reuse of prompts. N clients send requests one after
another. The first of each is not counted; then all begin together.

- Over HTTP: `prejit serve` and `llama-server`, both by streams of /v1/completions. The client is a process on
  the same two cores, which reads bytes while it measures and parses them afterwards.
- In process: prejit's engine and OpenVINO GenAI's ContinuousBatchingPipeline, which has no HTTP server of its
  own. Clients are threads; one more drives the model.

Each round starts a fresh process of each system and model, in turns, which stays for all numbers of clients.
int8 is each one's own: prejit's, llama.cpp's q8_0, and the 8-bit weights that optimum-intel writes (a scale
and a zero point for each channel).
Memory is the largest resident set of the process since its start, with the pages of mapped files.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.harness import peer_environments, workload
from benchmarks.harness.fresh_processes import BENCHMARKS, environment, progress
from benchmarks.harness.models import decoder_manifest
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, option_parser, publish, use_two_cores
from benchmarks.harness.workspace import Bench, bench_directory
from benchmarks.peers.entrants import TASKS, Work, exported, gguf_file
from benchmarks.peers.serving_child import quantile

CONTEXTS = (128, 1024, 2048)
"""Contexts of bundles. The shortest that holds the longest prompt and its new tokens is used."""
LONG_PROMPTS = (32, 64, 256)
"""Prompt buckets of bundles for prompts of many lengths."""
START_SECONDS = 120
CHILD = str(BENCHMARKS / "peers/serving_child.py")


@dataclass(frozen=True)
class Model:
    """A model and the form of its weights in each system.

    Attributes:
        source: name of the model.
        dtype: dtype of prejit's bundle.
        gguf: kind of llama.cpp's file.
        openvino: weights of OpenVINO's export.
        vocabulary: number of tokens.
        tokens: new tokens of each request.
    """

    source: str
    dtype: str
    gguf: str
    openvino: str
    vocabulary: int
    tokens: int


MODELS = {
    "gpt2-float32": Model("gpt2", "float32", "f32", "fp32", workload.VOCABULARY, 64),
    "gpt2-int8": Model("gpt2", "int8", "q8_0", "int8", workload.VOCABULARY, 64),
    "llama-1b-int8": Model("llama-1b", "int8", "q8_0", "int8", workload.LLAMA_1B.vocabulary, 32),
}
TITLES = {
    "gpt2-float32": "GPT-2 124M, float32",
    "gpt2-int8": "GPT-2 124M, int8",
    "llama-1b-int8": "Llama 1B, int8",
}
COLUMNS: dict[str, Callable[[dict[str, Any]], float]] = {
    "tokens/s": lambda cell: cell["tokens_per_second"],
    "first token p50, ms": lambda cell: quantile(cell["first_ms"], 50),
    "p95, ms": lambda cell: quantile(cell["first_ms"], 95),
    "between tokens p95, ms": lambda cell: cell["gap_ms"]["95"],
    "p99, ms": lambda cell: cell["gap_ms"]["99"],
    "memory, MB": lambda cell: cell["memory"] / 1e6,
}
"""Heads of the columns, and where their figures are. More is better in the first one only."""
PREJIT_SERVER, LLAMA_SERVER = "prejit serve", "llama-server"
PREJIT_ENGINE, OPENVINO = "prejit engine", "OpenVINO"
PAIRS = {
    "Over HTTP": (PREJIT_SERVER, LLAMA_SERVER),
    "In process": (PREJIT_ENGINE, OPENVINO),
    "What HTTP costs": (PREJIT_SERVER, PREJIT_ENGINE),
}


@dataclass(frozen=True)
class Prepared:
    """What the systems need for a model.

    Attributes:
        model: the model.
        counts: numbers of clients, ascending.
        tokens: new tokens of each request.
        prompts: lengths of the prompts, as 32, 32-900 or 1000+32-900.
        bundle: prejit's bundle; empty: not needed.
        gguf: llama.cpp's file.
        openvino: OpenVINO's directory.
        llama_server: the program.
        openvino_python: the interpreter of OpenVINO.
    """

    model: Model
    counts: tuple[int, ...]
    tokens: int
    prompts: str
    bundle: str
    gguf: str
    openvino: str
    llama_server: str
    openvino_python: str

    @property
    def context(self) -> int:
        """Tokens of a request, its new ones included."""
        return context_of(self.prompts)

    @property
    def reuse(self) -> bool:
        """Whether prompts share a beginning that systems may keep."""
        return "+" in self.prompts


Cells = list[dict[str, Any]]
"""What a process found, by numbers of clients."""


def prepare(
    bench: Bench,
    name: str,
    systems: Sequence[str],
    counts: tuple[int, ...],
    tokens: int,
    prompts: str,
) -> Prepared:
    """Make the environments, files and bundles that are missing."""
    model = MODELS[name]
    bundle = gguf = openvino = llama_server = openvino_python = ""
    if PREJIT_SERVER in systems or PREJIT_ENGINE in systems:
        context = context_of(prompts)
        sizes = {"batch": counts, "prompt": (workload.PROMPT_TOKENS,), "context": (context,)}
        title = f"{kind_of(prompts)}-{name}"
        if context > CONTEXTS[0]:
            sizes |= {"batch": tuple(sorted({1, *counts})), "prompt": LONG_PROMPTS}
        source = str(with_tokenizer(bench, model.source))
        bundle = bench.built_manifest(title, decoder_manifest(title, source, model.dtype, sizes))
    if LLAMA_SERVER in systems:
        python = peer_environments.interpreter(bench.directory, "llama-server")
        gguf = gguf_file(bench, model.source, model.gguf, python)
        llama_server = str(Path(python).with_name("llama-server"))
    if OPENVINO in systems:
        openvino_python = peer_environments.interpreter(bench.directory, "openvino")
        work = Work("generate", model.source)
        openvino = exported(bench, work, "openvino", TASKS["generate"], model.openvino)
    return Prepared(
        model=model,
        counts=counts,
        tokens=tokens or model.tokens,
        prompts=prompts,
        bundle=bundle,
        gguf=gguf,
        openvino=openvino,
        llama_server=llama_server,
        openvino_python=openvino_python,
    )


def context_of(prompts: str) -> int:
    """Return the context for prompts of these lengths and their new tokens."""
    shared, _, length = prompts.rpartition("+")
    longest = int(shared or 0) + int(length.rpartition("-")[2])
    tokens = max(model.tokens for model in MODELS.values())
    return next(context for context in CONTEXTS if longest + tokens <= context)


def kind_of(prompts: str) -> str:
    """Return the name of the results, with which the names of bundles begin."""
    if "+" in prompts:
        return "serving-shared"
    return "serving-bursts" if "-" in prompts else "serving-peers"


def with_tokenizer(bench: Bench, name: str) -> Path:
    """Return the directory of a model with a byte-level tokenizer, whose tokens are words of four letters."""
    source = bench.model(name)
    directory = bench.directory / f"{name}-text"
    if not directory.is_dir():
        size = json.loads((source / "config.json").read_text())["vocab_size"]
        letters = "abcdefghijklmnopqrst"
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = ("\u0120" + "".join(word) for word in itertools.product(letters, repeat=4))
        names = itertools.islice(itertools.chain(alphabet, words), size)
        made = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        partial = directory.with_suffix(".partial")
        shutil.copytree(source, partial, copy_function=os.link, dirs_exist_ok=True)
        made.save(str(partial / "tokenizer.json"))
        partial.rename(directory)
    return directory


@contextmanager
def running(command: Sequence[str], port: int, ready: str) -> Iterator[int]:
    """Run a server; yield its process id when it answers the path `ready`, and end it.

    Raises:
        SystemExit: it ended or was not ready in time; its last words are in the text.
    """
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment({}))
        try:
            latest = time.monotonic() + START_SECONDS
            while not answers(port, ready):
                time.sleep(0.02)
                if server.poll() is not None or time.monotonic() > latest:
                    log.seek(0)
                    raise SystemExit(f"{command[0]} is not ready: {log.read()[-2000:]}")
            yield server.pid
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def answers(port: int, path: str) -> bool:
    """Return whether a server answers a path with 200."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False


def child(python: str, way: str, target: str, prepared: Prepared) -> Cells:
    """Return what the clients of a child process found."""
    sizes = (prepared.model.vocabulary, prepared.tokens, *prepared.counts)
    command = (python, CHILD, way, target, prepared.prompts, *map(str, sizes))
    said = subprocess.run(command, capture_output=True, text=True, env=environment({}), check=False)
    if said.returncode:
        raise SystemExit(f"{' '.join(command)}: {said.stderr[-2000:]}")
    return [json.loads(line) for line in said.stdout.splitlines() if line.startswith("{")]


def prejit_serve(prepared: Prepared) -> Cells:
    """Return what a fresh `prejit serve` gives."""
    port = free_port()
    command = (
        sys.executable,
        "-m",
        "prejit.runtime",
        "serve",
        prepared.bundle,
        "--port",
        str(port),
        *(() if prepared.reuse else ("--prefix-memory", "0")),
        "--ignore-unknown-fields",  # one of llama.cpp's
    )
    with running((*command, "--on-mismatch", "error"), port, "/health/ready") as process:
        return child(sys.executable, "http", f"{port}:{process}", prepared)


def llama_options(prepared: Prepared) -> list[str]:
    """Return the options of llama.cpp's server: as many slots as clients, and prejit's cache."""
    slots, threads = max(prepared.counts), str(workload.threads())
    cache = "f32" if prepared.model.dtype == "float32" else "f16"
    given = [
        "--model",
        prepared.gguf,
        "--parallel",
        str(slots),
        "--ctx-size",
        str(slots * max(256, prepared.context)),
    ]
    given += ["--threads", threads, "--threads-batch", threads]
    given += ["--cache-type-k", cache, "--cache-type-v", cache, "--no-ui"]
    given += [] if prepared.reuse else ["--cache-ram", "0"]
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    # Its product for CPUs with AMX crashes on q8_0; see llama_cpp_child.py.
    return [*given, "--no-repack"] if " amx_int8" in flags else given


def llama_serve(prepared: Prepared) -> Cells:
    """Return what a fresh llama-server gives."""
    port = free_port()
    command = (prepared.llama_server, *llama_options(prepared), "--port", str(port))
    with running(command, port, "/health") as process:
        return child(sys.executable, "http", f"{port}:{process}", prepared)


SYSTEMS: dict[str, Callable[[Prepared], Cells]] = {
    PREJIT_SERVER: prejit_serve,
    LLAMA_SERVER: llama_serve,
    PREJIT_ENGINE: lambda prepared: child(sys.executable, "engine", prepared.bundle, prepared),
    OPENVINO: lambda prepared: child(
        prepared.openvino_python, "openvino", prepared.openvino, prepared
    ),
}


def main() -> None:
    """Prepare, measure and write."""
    parser = option_parser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--systems", default="", help="parts of the names of those that run")
    parser.add_argument("--clients", default="1,4,8,16")
    parser.add_argument("--tokens", type=int, default=0, help="new tokens of each request")
    parser.add_argument("--prompts", default=str(workload.PROMPT_TOKENS), help="tokens, as 32-900")
    parser.add_argument("--prepare", action="store_true", help="only make what is needed")
    given = parser.parse_args()
    use_two_cores()
    bench = Bench(bench_directory(), given.rounds, quick=False)
    counts = tuple(sorted(int(each) for each in given.clients.split(",")))
    systems = [name for name in SYSTEMS if any(p in name for p in given.systems.split(","))]
    prepared = {
        name: prepare(bench, name, systems, counts, given.tokens, given.prompts)
        for name in given.models.split(",")
    }
    if given.prepare:
        return
    facts = begin(given.rounds)
    facts["versions"] |= peer_versions(bench, systems)
    facts |= {"counts": counts, "prompts": given.prompts}
    what = kind_of(given.prompts)
    facts["tokens"] = {name: ready.tokens for name, ready in prepared.items()}
    found: dict[str, list[Cells]] = {}
    for number in range(given.rounds):
        for name, ready in prepared.items():
            # Each round begins with another system.
            place = number % len(systems)
            for system in (*systems[place:], *systems[:place]):
                progress(f"round {number + 1} of {given.rounds}: {name}, {system}")
                found.setdefault(f"{name} {system}", []).append(SYSTEMS[system](ready))
        # Written after every round, so that a measurement that is cut short is not lost.
        facts |= {"runs": number + 1, "found": found}
        publish(facts, what, "Beside the servers of peers", tables(facts, systems))


def peer_versions(bench: Bench, systems: Sequence[str]) -> dict[str, str]:
    """Return the versions of the peers that took part."""
    found: dict[str, str] = {}
    if LLAMA_SERVER in systems:
        found |= peer_environments.source_version(bench.directory, "llama-server")
    if OPENVINO in systems:
        python = peer_environments.interpreter(bench.directory, "openvino")
        found |= peer_environments.package_versions(python, ("openvino", "openvino-genai"))
    return found


def figure(facts: dict[str, Any], name: str, system: str, place: int, column: str) -> float:
    """Return a figure: the median of all rounds."""
    cells = [one[place] for one in facts["found"][f"{name} {system}"]]
    return statistics.median(map(COLUMNS[column], cells))


def cell(facts: dict[str, Any], name: str, pair: Sequence[str], place: int, column: str) -> str:
    """Return the figures of a pair of systems, the better one bold."""
    values = [figure(facts, name, system, place, column) for system in pair]
    best = max(values) if column == "tokens/s" else min(values)
    digits = 1 if max(values) < 100 else 0
    said = [f"{value:.{digits}f}" for value in values]
    return " / ".join(
        f"**{text}**" if value == best else text for text, value in zip(said, values, strict=True)
    )


def tables(facts: dict[str, Any], systems: Sequence[str]) -> list[Table]:
    """Return the figures of each pair of systems that ran."""
    made = []
    tokens = ", ".join(f"{count} of {TITLES[name]}" for name, count in facts["tokens"].items())
    note = (
        f"Prompts of {facts['prompts']} tokens; new tokens of each request: {tokens}. The better "
        "figure of a pair is bold."
    )
    for title, pair in PAIRS.items():
        if not set(pair) <= set(systems):
            continue
        rows = [
            (TITLES[name], str(clients), *(cell(facts, name, pair, place, c) for c in COLUMNS))
            for name in facts["tokens"]
            for place, clients in enumerate(facts["counts"])
        ]
        heads = ("model", "clients", *COLUMNS)
        made.append(Table(f"{title}: {' / '.join(pair)}", heads, rows, note))
    return made


if __name__ == "__main__":
    main()
