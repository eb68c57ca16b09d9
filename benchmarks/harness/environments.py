"""Environments of the peers: one venv each under $PREJIT_BENCH_DIR/envs, made when a row first needs it.

pip installs packages by name, as it is configured. What only converts models is apart from what runs them.
`PREJIT_BENCH_TORCH` is the requirement for torch (default `torch`): a build for CPUs saves gigabytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from benchmarks.harness.measure import clock, progress

TORCH = os.environ.get("PREJIT_BENCH_TORCH", "torch")


@dataclass(frozen=True)
class Environment:
    """A virtual environment of a peer.

    Attributes:
        packages: requirements for pip.
        minutes: approximate time to make it on two cores.
        variables: environment variables while pip runs.
        unwanted: packages that pip brings along and that must go.
    """

    packages: tuple[str, ...]
    minutes: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    unwanted: tuple[str, ...] = ()


_OWN = ("jax", "jaxlib", "numpy", "zstandard", "tokenizers", "jinja2", "safetensors")

ENVIRONMENTS = {
    # What a server with prejit installs, in the versions of the bundles; safetensors is for the rows of JAX.
    "prejit": Environment(tuple(f"{name}=={version(name)}" for name in _OWN)),
    # Compiled for this machine, as its authors advise; gguf writes the model files.
    "llama.cpp": Environment(
        ("llama-cpp-python", "gguf", "numpy"), 15, {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}
    ),
    "ctranslate2": Environment(("ctranslate2", "numpy")),
    "onnxruntime": Environment(("onnxruntime", "numpy")),
    "iree": Environment(("iree-base-compiler", "iree-base-runtime", "numpy")),
    "openvino": Environment(("openvino", "openvino-genai")),
    "llguidance": Environment(("llguidance",)),
    "xgrammar": Environment((TORCH, "xgrammar"), 3, unwanted=("triton",)),
    "export-onnx": Environment((TORCH, "optimum-onnx[onnxruntime]", "ctranslate2"), 3),
    "export-openvino": Environment(
        (TORCH, "optimum-intel[openvino]", "onnx"), 3, unwanted=("torchvision",)
    ),
}


class EnvironmentFailedError(Exception):
    """An environment cannot be made; the text is pip's last error."""


def interpreter(directory: Path, name: str) -> str:
    """Return the Python of an environment; make it if it is missing or holds other packages.

    Args:
        directory: directory of the benchmark.
        name: a key of ENVIRONMENTS.

    Raises:
        EnvironmentFailedError: pip failed; its output is in envs/NAME.log.
    """
    wanted = ENVIRONMENTS[name]
    root = directory / "envs" / name
    python, ready = root / "bin" / "python", root / ".ready"
    made_from = "\n".join(wanted.packages)
    if ready.is_file() and ready.read_text() == made_from:
        return str(python)
    progress(f"environment {name}: {', '.join(wanted.packages)} (about {wanted.minutes} min)")
    started = time.perf_counter()
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    pip = (str(python), "-m", "pip")
    commands = [
        (sys.executable, "-m", "venv", str(root)),
        (*pip, "install", *wanted.packages),
        *((*pip, "uninstall", "--yes", package) for package in wanted.unwanted),
    ]
    with open(root.with_suffix(".log"), "w+") as log:
        for command in commands:
            code = subprocess.run(
                command, stdout=log, stderr=log, env={**os.environ, **wanted.variables}, check=False
            ).returncode
            if code:
                log.seek(0)
                said = log.read().splitlines() or [f"exit status {code}"]
                errors = [line for line in said if line.startswith("ERROR")]
                raise EnvironmentFailedError(f"environment {name}: {(errors or said)[-1]}")
    ready.write_text(made_from)
    progress(f"environment {name}: {clock(time.perf_counter() - started)}")
    return str(python)


def package_versions(python: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Return the installed versions of packages in an environment, without those that are missing."""
    code = (
        "import sys, importlib.metadata as m\n"
        "have = {d.name for d in m.distributions()}\n"
        "print(*(f'{n}={m.version(n)}' for n in sys.argv[1:] if n in have))"
    )
    said = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True)
    return dict(item.split("=", 1) for item in said.stdout.split())
