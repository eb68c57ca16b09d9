"""Environments of the peers: one venv each under $PREJIT_BENCH_DIR/envs, made when a row first needs it.

pip installs packages by name, as it is configured. What only converts models is apart from what runs them.
`PREJIT_BENCH_TORCH` is the requirement for torch (default `torch`): a build for CPUs saves gigabytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO

from benchmarks.harness.fresh_processes import clock, progress

TORCH = os.environ.get("PREJIT_BENCH_TORCH", "torch")


@dataclass(frozen=True)
class Program:
    """A program that no package installs, compiled from the sources that a package carries.

    Attributes:
        name: name of the program and of its CMake target.
        package: package on PyPI.
        folder: folder of the sources in the package's source archive.
        options: options of CMake.
    """

    name: str
    package: str
    folder: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Environment:
    """A virtual environment of a peer.

    Attributes:
        packages: requirements for pip.
        minutes: approximate time to make it on two cores.
        variables: environment variables while pip runs.
        unwanted: packages that pip brings along and that must go.
        program: program that is compiled into its bin directory; None: there is none.
    """

    packages: tuple[str, ...]
    minutes: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)
    unwanted: tuple[str, ...] = ()
    program: Program | None = None


_OWN = ("jax", "jaxlib", "numpy", "blake3", "zstandard", "tokenizers", "jinja2", "safetensors")

ENVIRONMENTS = {
    # What a server with prejit installs, in the versions of the bundles; safetensors is for the rows of JAX.
    "prejit": Environment(tuple(f"{name}=={version(name)}" for name in _OWN)),
    # Compiled for this machine, as its authors advise; gguf writes the model files.
    "llama.cpp": Environment(
        ("llama-cpp-python", "gguf", "numpy"), 15, {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}
    ),
    # Its wheels are for AVX2. Its source does not compile: 0.1.5 lacks common/cmake/build-info-gen-cpp.cmake.
    "ik_llama.cpp": Environment(("ik-llama-cpp-python", "gguf", "numpy")),
    # Compiled for this machine, as llama.cpp. Its web page and its TLS would need the network and OpenSSL.
    "llama-server": Environment(
        ("gguf", "numpy", "cmake", "ninja"),
        20,
        program=Program(
            "llama-server",
            "llama-cpp-python",
            "vendor/llama.cpp",
            (
                *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DGGML_NATIVE=ON"),
                *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"),
                *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"),
            ),
        ),
    ),
    "ctranslate2": Environment(("ctranslate2", "numpy")),
    "onnxruntime": Environment(("onnxruntime", "numpy")),
    "openvino": Environment(("openvino", "openvino-genai")),
    "torch": Environment((TORCH, "transformers"), 3),
    "export-onnx": Environment((TORCH, "optimum-onnx[onnxruntime]", "onnx-ir", "ctranslate2"), 3),
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
    if wanted.program:
        made_from += f"\n{wanted.program}"
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
            _run(name, command, log, wanted.variables)
        if wanted.program:
            _compile(name, root, wanted.program, log)
    ready.write_text(made_from)
    progress(f"environment {name}: {clock(time.perf_counter() - started)}")
    return str(python)


def _run(name: str, command: tuple[str, ...], log: IO[str], more: Mapping[str, str]) -> None:
    """Run a command that makes an environment; its output goes to the log."""
    code = subprocess.run(
        command, stdout=log, stderr=log, env={**os.environ, **more}, check=False
    ).returncode
    if code:
        log.seek(0)
        said = log.read().splitlines() or [f"exit status {code}"]
        errors = [line for line in said if line.startswith("ERROR")]
        raise EnvironmentFailedError(f"environment {name}: {(errors or said)[-1]}")


def _compile(name: str, root: Path, program: Program, log: IO[str]) -> None:
    """Compile a program into the bin directory of an environment, and keep the archive of its sources."""
    python = str(root / "bin" / "python")
    cmake, ninja = (str(root / "bin" / tool) for tool in ("cmake", "ninja"))
    pip = (python, "-m", "pip", "download", "--no-deps", "--no-binary", program.package)
    _run(name, (*pip, "--dest", str(root), program.package), log, {})
    (archive,) = root.glob("*.tar.gz")
    with tempfile.TemporaryDirectory(dir=root) as directory:
        shutil.unpack_archive(archive, directory, filter="data")
        (source,) = Path(directory).glob(f"*/{program.folder}")
        build = str(Path(directory, "build"))
        tools = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}")
        _run(name, (cmake, "-S", str(source), "-B", build, *tools, *program.options), log, {})
        _run(name, (cmake, "--build", build, "--target", program.name), log, {})
        shutil.copy2(Path(build, "bin", program.name), root / "bin")


def source_version(directory: Path, name: str) -> dict[str, str]:
    """Return the version of the package whose sources an environment's program was compiled from."""
    program = ENVIRONMENTS[name].program
    assert program, name
    (archive,) = (directory / "envs" / name).glob("*.tar.gz")
    return {program.package: archive.name.removesuffix(".tar.gz").rpartition("-")[2]}


def package_versions(python: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Return the installed versions of packages in an environment, without those that are missing."""
    code = (
        "import sys, importlib.metadata as m\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(f'{name}={m.version(name)}')\n"
        "    except m.PackageNotFoundError: pass"
    )
    said = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True)
    return dict(item.split("=", 1) for item in said.stdout.split())
