"""The benchmark's directory: models, bundles, environments, caches."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from benchmarks.harness import workload
from benchmarks.harness.fresh_processes import (
    BENCHMARKS,
    FailedProcessError,
    Row,
    progress,
    run_once,
)
from benchmarks.harness.models import decoder_manifest

NEEDED_BYTES = {"llama-1b": 40_000_000_000, "llama-3b": 80_000_000_000}
"""Free disk that a large model needs: itself, three bundles of each dtype, their parts in the build cache,
and its peers' files."""
PREJIT_COMMAND = str(Path(sys.executable).parent / "prejit")


def bench_directory() -> Path:
    """Return $PREJIT_BENCH_DIR, or ~/.cache/prejit/bench, and make it."""
    given = os.environ.get("PREJIT_BENCH_DIR") or os.path.expanduser("~/.cache/prejit/bench")
    Path(given).mkdir(parents=True, exist_ok=True)
    return Path(given).resolve()


def jax_cache(directory: Path) -> dict[str, str]:
    """Return the environment in which JAX keeps every executable in a directory."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(directory),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@dataclass(frozen=True)
class Bench:
    """The directory of a benchmark, and how often it measures.

    Attributes:
        directory: directory of models, bundles, environments and caches.
        runs: number of fresh processes of each row.
        quick: whether to run the main rows only.
    """

    directory: Path
    runs: int
    quick: bool

    @property
    def weights(self) -> str:
        """Path of GPT-2's weights for plain JAX."""
        return str(self.directory / "gpt2.safetensors")

    def bundle(self, name: str) -> str:
        """Return a bundle's directory."""
        return str(self.directory / "bundles" / name)

    @property
    def prejit(self) -> dict[str, str]:
        """Environment of prejit's rows. It keeps receipts of verified files apart from the user's."""
        return {"PREJIT_RUNTIME_CACHE": str(self.directory / "runtime-cache")}

    @property
    def warm(self) -> dict[str, str]:
        """Environment of rows of JAX that keep every executable on disk."""
        return jax_cache(self.directory / "jax-cache")

    def model(self, name: str) -> Path:
        """Return the directory of a model of models.py or encoder_model.py; make it if it is missing.

        Raises:
            FailedProcessError: making it failed, or the disk has no room for its bundles and files.
        """
        needed = 0 if (self.directory / name).is_dir() else NEEDED_BYTES.get(name, 0)
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise FailedProcessError(
                f"expected {needed / 1e9:.0f} GB of free disk for {name}, its bundles and its peers' files, "
                f"found {free / 1e9:.0f} GB in {self.directory}"
            )
        if name == "minilm":
            run_once(Row("model", ("harness/encoder_model.py", str(self.directory / name))))
        else:
            run_once(Row("model", ("harness/models.py", str(self.directory), name)))
        return self.directory / name

    def build_row(self, name: str, label: str, output: Path, cache: Path) -> Row:
        """Return the row that builds one manifest."""
        manifest = str(self.directory / f"{name}.toml")
        options = ("-o", str(output), "--cache", str(cache), "--json")
        return Row(label, (PREJIT_COMMAND, "build", manifest, *options), self.prejit)

    def built(self, name: str, source: str, dtype: str, sizes: workload.Sizes) -> str:
        """Return the bundle of a decoder; build it unless this checkout has built it before.

        Args:
            name: name of the bundle.
            source: name of the model.
            dtype: dtype of its weights.
            sizes: the manifest's `[generate]`.

        Returns:
            The bundle's directory.
        """
        self.model(source)
        return self.built_manifest(name, decoder_manifest(name, source, dtype, sizes))

    def built_manifest(self, name: str, manifest: str) -> str:
        """Return the bundle of any manifest; see `built`."""
        (self.directory / f"{name}.toml").write_text(manifest)
        stamp = self.directory / "bundles" / f".{name}.built"
        made_from = sources_digest() + "\n" + manifest
        if not stamp.is_file() or stamp.read_text() != made_from:
            progress(f"prejit build {name}.toml")
            stamp.unlink(missing_ok=True)
            shutil.rmtree(self.bundle(name), ignore_errors=True)
            output, cache = self.directory / "bundles", self.directory / "build-cache"
            run_once(self.build_row(name, name, output, cache))
            stamp.write_text(made_from)
        return self.bundle(name)


@cache
def sources_digest() -> str:
    """Return the SHA-256 of what builds bundles: prejit's sources and jaxlib's version, read once.

    A bundle that another state of the sources built is never measured as this one's.
    """
    return digest_now()


def digest_now() -> str:
    """Return `sources_digest` of the files as they are now."""
    digest = hashlib.sha256(version("jaxlib").encode())
    for root in ("compiler", "runtime", "server"):
        for path in sorted((BENCHMARKS.parent / root).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"\0{path.relative_to(BENCHMARKS.parent)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()
