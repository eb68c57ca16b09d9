"""Measure again what the project began with: a KV cache beside op by op, 22 encoder shapes, sizes of caches.

    python -m benchmarks.studies.origins [--runs 3]     6 minutes on two quiet cores, and 4 for the bundles

GPT-2 of 124 million parameters answers 4 tokens with 15, as in a published guide to KV caches in JAX. An
encoder of MiniLM's sizes runs the 22 shapes of manifests/encoder.toml. All in float32, in fresh processes
that take turns. Writes benchmarks/results/.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import zstandard

from benchmarks.harness import workload
from benchmarks.harness.fresh_processes import Row, Sample, Spread, interleave, progress
from benchmarks.harness.report import (
    JAX_COLD,
    JAX_WARM,
    MB,
    Samples,
    Table,
    Target,
    cell,
    median,
    ratio_within_rounds,
)
from benchmarks.harness.results import begin, option_parser, publish_rows, use_two_cores
from benchmarks.harness.workspace import PREJIT_COMMAND, Bench, bench_directory, jax_cache
from benchmarks.peers.entrants import encoder_bundle

NO_CACHE, OP_BY_OP, PREJIT = "JAX op by op, no KV cache", "JAX op by op", "prejit"
NAMES = tuple(f"{batch}x{length}" for batch, length in workload.ENCODER_SHAPES)
SAME = 1e-3
"""Largest difference of one value, summed over up to 64 embeddings: engines add in different orders."""
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Stored:
    """Executables on disk.

    Attributes:
        count: number of executables.
        compressed: bytes of their files, or of their layer.
        expanded: bytes without compression.
    """

    count: int
    compressed: int
    expanded: int

    def cells(self) -> tuple[str, str, str]:
        """Return the cells of a table."""
        return str(self.count), f"{self.compressed / MB:.2f}", f"{self.expanded / MB:.2f}"


def expanded_bytes(content: bytes) -> int:
    """Return how long compressed content is, which is zstd's or zlib's."""
    if not content.startswith(ZSTD_MAGIC):
        return len(zlib.decompress(content))
    with zstandard.ZstdDecompressor().stream_reader(
        io.BytesIO(content), read_across_frames=True
    ) as reader:
        return sum(len(part) for part in iter(lambda: reader.read(1 << 20), b""))


def jax_cache_size(directory: Path) -> Stored:
    """Return what jax's persistent cache has in a directory."""
    files = [path.read_bytes() for path in directory.glob("*-cache")]
    return Stored(len(files), sum(map(len, files)), sum(map(expanded_bytes, files)))


def bundle_size(path: str) -> tuple[Stored, int]:
    """Return the executables of a bundle, and the bytes of the native kernels that they call."""
    command = (PREJIT_COMMAND, "inspect", path, "--json")
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (target,) = json.loads(said)["targets"]
    layers = {layer["mediaType"].split(".")[2]: layer for layer in target["layers"]}
    digest = layers["executables"]["digest"].removeprefix("sha256:")
    content = Path(path, "blobs", "sha256", digest).read_bytes()
    count = len(target["config"]["programs"])
    kernels = layers.get("kernels", {"size": 0})["size"]
    return Stored(count, len(content), expanded_bytes(content)), kernels


def text(bench: Bench, bundle: str, cache: Path) -> dict[str, list[Sample]]:
    """Measure short requests of GPT-2."""
    command = ("peers/jax_baseline.py", "requests", bench.weights)
    rows = (
        Row(NO_CACHE, (*command, "--op-by-op", "--no-cache")),
        Row(OP_BY_OP, (*command, "--op-by-op")),
        Row(JAX_COLD, command),
        Row(JAX_WARM, command, jax_cache(cache)),
        Row(PREJIT, ("peers/prejit_child.py", "requests", bundle), bench.prejit),
    )
    samples = interleave(rows, bench.runs)
    for sample in (sample for found in samples.values() for sample in found):
        sample["answer_seconds"] = sample["first_seconds"] + sample["rest_seconds"]
    return samples


def shapes(bench: Bench, bundle: str, cache: Path) -> dict[str, list[Sample]]:
    """Measure the first call and later calls of each shape of the encoder."""
    command = ("peers/encode_child.py", "jax", str(bench.model("minilm")))
    rows = (
        Row(JAX_COLD, command),
        Row(JAX_WARM, command, jax_cache(cache)),
        Row(PREJIT, ("peers/encode_child.py", "bundle", bundle), bench.prejit),
    )
    samples = interleave(rows, bench.runs)
    for sample in (sample for found in samples.values() for sample in found):
        first, later = sample["first"], sample["steady"]
        sample["all_first_seconds"] = sum(first.values())
        sample["all_later_seconds"] = sum(later.values())
        sample["new_shape_seconds"] = (sum(first.values()) - sum(later.values())) / len(NAMES)
        sample["worst"] = max(first[name] / later[name] for name in NAMES)
        sample["answer_seconds"] = sample["first_seconds"] + sum(first.values()) - first[NAMES[0]]
    return samples


def text_table(samples: Samples) -> Table:
    """Return the table of short requests."""
    head = (
        *("", "exec → 1st token, s", "exec → 15th token, s", "first request, s"),
        *("later requests, tokens/s", "to op by op", "peak RSS, MB"),
    )
    rate = "warm_tokens_per_second"
    lines = [
        (
            f"**{name}**" if name == PREJIT else name,
            cell(found, "first_seconds"),
            cell(found, "answer_seconds"),
            cell(found, "request_seconds"),
            cell(found, rate, 1),
            f"{ratio_within_rounds(samples, name, OP_BY_OP, rate):.1f} x",
            cell(found, "rss_bytes", 0, MB),
        )
        for name, found in samples.items()
    ]
    note = (
        "Op by op no function of the model is jitted. All but the first row have a KV cache of 128 "
        "positions; prejit pads the prompt to 32. The first request begins when weights or bundle are loaded."
    )
    return Table("GPT-2 124M, 4 tokens in, 15 out", head, lines, note)


def shape_tables(samples: Samples) -> list[Table]:
    """Return the tables of the encoder: all shapes together, and each."""
    head = (
        *("", "exec → 1st embedding, s", "exec → all 22 shapes, s", "22 first calls, s"),
        *("22 later calls, s", "worst first call, to later ones", "peak RSS, MB"),
    )
    lines = [
        (
            f"**{name}**" if name == PREJIT else name,
            cell(found, "first_seconds"),
            cell(found, "answer_seconds"),
            cell(found, "all_first_seconds"),
            cell(found, "all_later_seconds"),
            cell(found, "worst", 1),
            cell(found, "rss_bytes", 0, MB),
        )
        for name, found in samples.items()
    ]
    whole = Table("An encoder of MiniLM's sizes, 22 shapes", head, lines)
    each = [
        (
            name,
            *(
                f"{_shape(samples[row], key, name):.2f}"
                for key in ("first", "steady")
                for row in (JAX_COLD, JAX_WARM, PREJIT)
            ),
            f"{_later_ratio(samples, name):.2f} x",
        )
        for name in NAMES
    ]
    columns = ("jit", "jit, persistent cache", "prejit")
    heads = (
        "sentences x tokens",
        *(f"first call: {column}, ms" for column in columns),
        *(f"later: {column}" for column in columns),
        "prejit to jit, later",
    )
    return [whole, Table("Each shape", heads, each)]


def _shape(found: Sequence[Sample], key: str, name: str) -> float:
    return 1e3 * Spread.of([sample[key][name] for sample in found]).median


def _later_ratio(samples: Samples, name: str) -> float:
    pairs = zip(samples[PREJIT], samples[JAX_WARM], strict=True)
    return Spread.of([mine["steady"][name] / jits["steady"][name] for mine, jits in pairs]).median


def sizes_table(stored: Mapping[str, Stored], kernels: Mapping[str, int]) -> Table:
    """Return the table of sizes."""
    head = ("", "executables", "compressed, MB", "expanded, MB", "native kernels, MB")
    lines = [
        (name, *found.cells(), f"{kernels[name] / MB:.2f}" if name in kernels else "")
        for name, found in stored.items()
    ]
    note = (
        "jax's cache also has an entry for each small function around the model. A bundle also has programs "
        "for buckets that did not run here."
    )
    return Table("Executables on disk", head, lines, note)


FIRST_FIGURES = "Figures that the project began with"


def origins_table(gpt2: Samples, encoder: Samples) -> Table:
    """Return the first figures beside today's."""
    rate, new = "warm_tokens_per_second", "new_shape_seconds"
    guide = ratio_within_rounds(gpt2, PREJIT, NO_CACHE, rate)
    lines = (
        ("a guide: no KV cache, tokens/s", "1.50", cell(gpt2[NO_CACHE], rate, 1)),
        ("the guide: with its KV cache; here prejit", "24.45", cell(gpt2[PREJIT], rate, 1)),
        ("the guide: the second to the first", "16.3 x", f"{guide:.1f} x"),
        (
            "the guide: 15 tokens, s; here prejit's first request",
            "0.63",
            cell(gpt2[PREJIT], "request_seconds"),
        ),
        ("first request op by op, s", "3.92", cell(gpt2[OP_BY_OP], "request_seconds")),
        ("first request of prejit, s", "0.33", cell(gpt2[PREJIT], "request_seconds")),
        ("later requests op by op, tokens/s", "7.6", cell(gpt2[OP_BY_OP], rate, 1)),
        ("later requests of prejit, tokens/s", "74", cell(gpt2[PREJIT], rate, 1)),
        ("a new shape of the encoder, jit, s", "0.34", cell(encoder[JAX_COLD], new, 3)),
        ("a new shape, persistent cache, s", "0.14", cell(encoder[JAX_WARM], new, 3)),
        ("a new shape, prejit, s", "", cell(encoder[PREJIT], new, 3)),
    )
    note = (
        "Those figures are of other machines and days: compare ratios. The cost of a new shape is its first "
        "call less a later one, the mean of 22."
    )
    return Table(FIRST_FIGURES, ("", "then", "now"), lines, note)


def targets(gpt2: Samples, encoder: Samples) -> list[Target]:
    """Return the targets."""
    texts = {tuple(sample["tokens"]) for found in gpt2.values() for sample in found}
    expected = encoder[JAX_COLD][0]["sums"]
    different = sum(
        any(abs(sample["sums"][name] - expected[name]) > SAME for name in NAMES)
        for found in encoder.values()
        for sample in found[:1]
    )
    slower = sum(_later_ratio(encoder, name) > 1 for name in NAMES)
    rate = "warm_tokens_per_second"
    return [
        Target("texts that differ from the first row's", len(texts) - 1, 0),
        Target("rows whose embeddings differ", different, 0),
        Target(
            "later requests, to JAX's jit with a KV cache",
            ratio_within_rounds(gpt2, PREJIT, JAX_WARM, rate),
            1,
            " x",
            at_least=True,
        ),
        *(
            Target(
                f"exec to {what}, to a warm persistent cache",
                ratio_within_rounds(samples, PREJIT, JAX_WARM, "answer_seconds"),
                0.6,
                " x",
            )
            for what, samples in (("the 15th token", gpt2), ("all 22 shapes", encoder))
        ),
        Target("worst of 22 first calls, to later ones", median(encoder[PREJIT], "worst"), 2, " x"),
        Target("shapes whose later calls are slower than jit's", slower, 0),
    ]


def main() -> None:
    """Build, measure and write."""
    parser = option_parser()
    parser.add_argument("--runs", type=int, default=3, help="fresh processes of each row")
    given = parser.parse_args()
    use_two_cores()
    facts = begin(given.runs)
    bench = Bench(bench_directory(), given.runs, quick=False)
    texts = bench.built("gpt2-float32", "gpt2", "float32", workload.FEW)
    vectors = encoder_bundle(bench, "float32")
    caches = bench.directory / "origins"
    shutil.rmtree(caches, ignore_errors=True)
    gpt2 = text(bench, texts, caches / "gpt2")
    encoder = shapes(bench, vectors, caches / "encoder")
    progress("sizes")
    stored, kernels = {}, {}
    for title, cache, bundle in (("GPT-2", "gpt2", texts), ("encoder", "encoder", vectors)):
        stored[f"{title}, jax's persistent cache"] = jax_cache_size(caches / cache)
        name = f"{title}, prejit's bundle"
        stored[name], kernels[name] = bundle_size(bundle)
    facts["samples"] = {"gpt2": gpt2, "encoder": encoder}
    tables = [
        origins_table(gpt2, encoder),
        text_table(gpt2),
        *shape_tables(encoder),
        sizes_table(stored, kernels),
    ]
    publish_rows(facts, "origins", tables, targets(gpt2, encoder))


if __name__ == "__main__":
    main()
