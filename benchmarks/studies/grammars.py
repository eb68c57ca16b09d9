"""Compare grammar libraries: import, reading a vocabulary, compiling schemas, and the masks of their texts.

    python -m benchmarks.studies.grammars [--rounds 5] [--name NAME]

Writes benchmarks/results/NAME.json and .md. Each library has an environment of its own, made in
$PREJIT_BENCH_DIR (PREJIT_BENCH_TORCH="torch==2.13.0" takes a build for CPUs). The vocabularies are byte-level
BPE of 50,257 and 128,256 tokens, trained on the Python files and documents of this environment, because no
published tokenizer may be loaded here. Every round is a fresh process of each library on each vocabulary.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.harness.environments import interpreter, package_versions
from benchmarks.harness.measure import progress
from benchmarks.harness.report import Table
from benchmarks.harness.results import begin, save, use_two_cores
from benchmarks.harness.workspace import RESULTS, bench_directory
from prejit.runtime.text.tokenizer import Tokenizer as BundleTokenizer

LIBRARIES = ("llguidance", "xgrammar")
SIZES = (50_257, 128_256)
CHILD = Path(__file__).with_name("grammars_child.py")
CORPUS_BYTES = 120 << 20


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT = {"type": "string"}
_NODE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": _object(name=_TEXT, children={"type": "array", "items": {"$ref": "#/$defs/node"}})
    },
}
_PERSON = _object(name=_TEXT, age={"type": "integer", "minimum": 0, "maximum": 150}, email=_TEXT)
_WORDS = ("The quick brown fox jumps over the lazy dog. " * 4).strip()
_LEAF: dict[str, Any] = {"name": "leaf", "children": []}

SCHEMAS: dict[str, tuple[dict[str, Any], Any]] = {
    "any object": ({"type": "object"}, {"title": _WORDS, "values": [1, 2.5, None, {"deep": True}]}),
    "person": (_PERSON, {"name": "Ada Lovelace", "age": 36, "email": "ada@example.org"}),
    "list": (
        {"type": "array", "items": _object(id={"type": "integer"}, note=_TEXT, done={"type": "boolean"})},
        [{"id": place, "note": _WORDS[: 30 + place], "done": place % 2 == 0} for place in range(12)],
    ),
    "enum and formats": (
        _object(
            country={"enum": [f"country {place}" for place in range(200)]},
            born={"type": "string", "format": "date"},
            code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4,8}$"},
        ),
        {"country": "country 137", "born": "1815-12-10", "code": "ABC-123456"},
    ),
    "recursive": (
        _NODE,
        {"name": "root", "children": [_LEAF, {"name": _WORDS[:60], "children": [_LEAF, _LEAF]}]},
    ),
}  # fmt: skip
"""Each schema with a value whose text is walked."""


def _corpus() -> Iterator[str]:
    """Yield texts of this environment, in a fixed order."""
    left = CORPUS_BYTES
    roots = (Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib")))
    for root in roots:
        for path in sorted(root.rglob("*")):
            if path.suffix in (".py", ".pyi", ".txt", ".md", ".rst", ".json") and path.is_file():
                text = path.read_text(encoding="utf-8", errors="ignore")[: 1 << 20]
                left -= len(text)
                if left < 0:
                    return
                yield text


def _tokenizer(size: int, directory: Path) -> Path:
    """Return the path of a byte-level BPE of this size; train it if it is missing."""
    path = directory / f"tokenizer-{size}.json"
    if not path.is_file():
        progress(f"training a tokenizer of {size} tokens")
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_corpus(), trainer)
        if tokenizer.get_vocab_size() != size:
            raise SystemExit(f"expected {size} tokens, found {tokenizer.get_vocab_size()}")
        tokenizer.save(str(path))
    return path


def _vocabulary(size: int, directory: Path) -> Path:
    """Write what a child reads: the bytes of all tokens, and schemas with the tokens of a text."""
    tokenizer = BundleTokenizer(_tokenizer(size, directory).read_bytes(), "tokenizer.json")
    table = tokenizer.vocabulary(size)
    # The special token is the last for xgrammar, which wants a stop token; llguidance adds its own.
    tokens = [(token or b"").hex() for token in (*table[1:], None)]
    schemas = {
        name: {
            "schema": schema,
            "token_ids": [token_id - 1 for token_id in tokenizer.encode(json.dumps(value))],
        }
        for name, (schema, value) in SCHEMAS.items()
    }
    path = directory / f"vocabulary-{size}.json"
    path.write_text(json.dumps({"tokens": tokens, "schemas": schemas}))
    return path


def _tables(runs: Mapping[str, Mapping[str, list[dict[str, Any]]]]) -> list[Table]:
    """Return the tables of the page: medians over the rounds."""
    tables = []
    for size, by_library in runs.items():
        rows, details = [], []
        for library, samples in by_library.items():
            median = {
                key: statistics.median(sample[key] for sample in samples)
                for key in ("import_seconds", "vocabulary_seconds", "resident_bytes")
            }
            rows.append(
                (
                    library,
                    f"{1e3 * median['import_seconds']:.0f}",
                    f"{1e3 * median['vocabulary_seconds']:.0f}",
                    f"{median['resident_bytes'] / 1e6:.0f}",
                )
            )
            for name in SCHEMAS:
                found = [sample["schemas"][name] for sample in samples]
                first = [seconds for one in found for seconds in one["first_text"]]
                again = [seconds for one in found for seconds in one["again"]]
                compiled = statistics.median(one["compile_seconds"] for one in found)
                details.append(
                    (
                        name,
                        library,
                        f"{1e3 * compiled:.2f}",
                        *(
                            f"{1e6 * value:.0f}"
                            for seconds in (first, again)
                            for value in (statistics.median(seconds), _p95(seconds), max(seconds))
                        ),
                    )
                )
        heads = ("", "import, ms", "vocabulary, ms", "memory, MB")
        tables.append(Table(f"{size} tokens", heads, rows, ""))
        times = tuple(
            f"{when}, {what}, µs" for when in ("mask", "again") for what in ("p50", "p95", "max")
        )
        details.sort(key=lambda row: list(SCHEMAS).index(row[0]))
        tables.append(
            Table(f"{size} tokens, by schema", ("schema", "", "compile, ms", *times), details, "")
        )
    return tables


def _p95(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.95 * (len(seconds) - 1))]


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default=f"{time.strftime('%Y-%m-%d')}-grammars")
    given = parser.parse_args()
    use_two_cores()
    directory = bench_directory() / "grammars"
    directory.mkdir(parents=True, exist_ok=True)
    pythons = {library: interpreter(bench_directory(), library) for library in LIBRARIES}
    paths = {size: _vocabulary(size, directory) for size in SIZES}
    facts = begin(given.rounds)
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {
        f"{size:,}": {library: [] for library in LIBRARIES} for size in SIZES
    }
    for number in range(1, given.rounds + 1):
        progress(f"round {number} of {given.rounds}")
        for size, path in paths.items():
            for library, python in pythons.items():
                done = subprocess.run(
                    [python, str(CHILD), library, str(path)],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                runs[f"{size:,}"][library].append(json.loads(done.stdout))
    packages = {
        library: package_versions(python, (library, "torch", "transformers", "apache-tvm-ffi"))
        for library, python in pythons.items()
    }
    facts |= {"packages": packages, "samples": runs}
    said = "; ".join(
        f"{lib}: {', '.join(f'{n} {v}' for n, v in p.items())}" for lib, p in packages.items()
    )
    page = (
        f"# Grammar libraries\n\n{facts['date']}, {facts['machine']['cpu']}, {facts['machine']['cores']} "
        f"cores, load {facts['machine']['load_average']:.1f}. {said}. Medians of {given.rounds} fresh "
        "processes; masks: of every token of one text, along its first walk and two further ones. "
        "`python -m benchmarks.studies.grammars` repeats it.\n\n"
    )
    save(RESULTS, given.name, facts, page + "\n".join(table.markdown() for table in _tables(runs)))


if __name__ == "__main__":
    main()
