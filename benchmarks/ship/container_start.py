"""A container from its start to its first answer, with one CPU and 512 MB: prejit beside a handler in JAX.

    sudo python -m benchmarks.ship.container_start artifacts/demo            five rounds, about three minutes
    sudo python -m benchmarks.ship.container_start artifacts/demo --rounds 1 --trial

The image is that of deploy/container/Containerfile, from the wheels of `make dist`. Its base is made here
from packages of Debian and this interpreter, in the layout of docker.io/library/python:3.13-slim; `--python
IMAGE` takes another one. podman runs it as a user without capabilities, and with a read-only root. The clock
runs from the start of podman to the body of the first answer: 16 greedy tokens. The JAX handler runs in the
same image with a warm compilation cache. Both must give the same text. Then the study asks the image's health
check, and stops the server during a request.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.ports import free_port

from benchmarks.harness.control_groups import CGROUPS
from benchmarks.harness.fresh_processes import Sample, progress
from benchmarks.harness.report import Table, cell, median
from benchmarks.harness.results import begin, option_parser, publish

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "manifests" / "demo-model"
BASE, IMAGE = "localhost/prejit-bench-python", "localhost/prejit-bench-server"
LIMITS = ("--cpus", "1", "--memory", "512m")
FILES = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096")
"""podman's own limits are higher than a machine may allow."""
LOCKED = (
    *("--read-only", "--tmpfs", "/tmp", "--cap-drop", "all"),
    *("--security-opt", "no-new-privileges", "--user", "10001"),
)
PROMPT, TOKENS, MANY = "def main(", 16, 400


def run(*command: str | Path, quiet: bool = False) -> str:
    """Run a program and return what it printed."""
    stderr = subprocess.DEVNULL if quiet else None
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=stderr, text=True
    ).stdout


def make_base(directory: Path) -> None:
    """Make an image of Debian and this interpreter in /usr/local, as the images of Python are."""
    names = "ca-certificates,libbz2-1.0,libffi8,liblzma5,libsqlite3-0,libssl3,zlib1g"
    packed = directory / "debian.tar"
    run("mmdebstrap", "--variant=minbase", f"--include={names}", "bookworm", packed)
    (directory / "python").mkdir()
    prefix = Path(sys.base_prefix)
    for name in ("bin", "lib"):
        ignored = shutil.ignore_patterns("test", "*.a", "__pycache__", "site-packages")
        target = directory / "python" / "usr" / "local" / name
        shutil.copytree(prefix / name, target, symlinks=True, ignore=ignored)
    run("podman", "import", "-q", packed, f"{BASE}:debian")
    work = run("buildah", "from", f"{BASE}:debian").strip()
    run("buildah", "copy", "-q", work, directory / "python", "/")
    for command in (
        ["ldconfig"],
        ["python3", "-m", "ensurepip"],
        ["ln", "-sf", "pip3", "/usr/local/bin/pip"],
    ):
        run("buildah", "run", "--isolation", "chroot", work, "--", *command)
    run("buildah", "commit", "-q", work, BASE)
    run("buildah", "rm", work)


def make_image(python: str) -> None:
    """Build the image of the server from the wheels in dist/."""
    containerfile = ROOT / "deploy" / "container" / "Containerfile"
    mounts = ["--volume=/etc/ssl/certs:/etc/ssl/certs:ro"]
    if Path("/etc/pip.conf").exists():  # a mirror, where this machine has one
        mounts.append("--volume=/etc/pip.conf:/etc/pip.conf:ro")
    built = ("buildah", "build", "--isolation", "chroot", "--network", "host", "--format", "docker")
    given = ("--build-arg", f"PYTHON={python}", "--tag", IMAGE, "-f", containerfile)
    run(*built, *mounts, *FILES[:2], *given, ROOT / "dist")


@contextlib.contextmanager
def container(options: tuple[str, ...], command: tuple[str, ...], *limits: str) -> Iterator[str]:
    """Run a container and yield its name."""
    name = f"prejit-bench-{time.monotonic_ns()}"
    # crun of Debian 12 does not start with control groups of both versions.
    begun = ("podman", "--runtime", "runc", "run", "--detach", "--name", name)
    run(*begun, *limits, *FILES, *LOCKED, *options, IMAGE, *command, quiet=True)
    try:
        yield name
    finally:
        subprocess.run(
            ["podman", "--runtime", "runc", "rm", "-f", "-v", name],
            capture_output=True,
            check=False,
        )


def ask(url: str, tokens: int = TOKENS) -> str:
    """Return the text that follows the prompt."""
    asked = {"model": "demo", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        url, json.dumps(asked).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        text: str = json.loads(answer.read())["choices"][0]["text"]
        return text


def first_answer(url: str) -> str:
    """Ask until an answer comes."""
    until = time.monotonic() + 120
    while True:
        try:
            return ask(url)
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


Start = Callable[[int], tuple[tuple[str, ...], tuple[str, ...], str]]
"""Returns the options, the command and the URL of a container that listens at a port."""


def prejit(bundle: Path) -> Start:
    """Return how the server starts, with the bundle mounted."""

    def start(port: int) -> tuple[tuple[str, ...], tuple[str, ...], str]:
        options = ("--network", "host", "--volume", f"{bundle}:/bundle/models:ro")
        command = ("serve", "demo=/bundle/models", "--port", str(port), "--on-mismatch", "error")
        return options, command, f"http://127.0.0.1:{port}/v1/completions"

    return start


def plain_jax(cache: Path) -> Start:
    """Return how the JAX handler starts."""

    def start(port: int) -> tuple[tuple[str, ...], tuple[str, ...], str]:
        options: tuple[str, ...] = (
            "--network",
            "host",
            "--entrypoint",
            "python",
            "--workdir",
            "/source",
        )
        options += ("--volume", f"{ROOT}/benchmarks:/source/benchmarks:ro")
        options += ("--volume", f"{CHECKPOINT}:/checkpoint:ro", "--volume", f"{cache}:/jax-cache")
        for name, value in (
            ("JAX_COMPILATION_CACHE_DIR", "/jax-cache"),
            ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0"),
            ("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1"),
            ("PYTHONDONTWRITEBYTECODE", "1"),
        ):
            options += ("--env", f"{name}={value}")
        command = ("-m", "benchmarks.peers.jax_handler", "/checkpoint", str(port))
        return options, command, f"http://127.0.0.1:{port}/"

    return start


def measure(start: Start, texts: set[str]) -> Sample:
    """Time one container, and add its text to the others."""
    options, command, url = start(free_port())
    began = time.perf_counter()
    with container(options, command, *LIMITS) as name:
        texts.add(first_answer(url))
        seconds = time.perf_counter() - began
        whole = run("podman", "inspect", "--format", "{{.Id}}", name, quiet=True).strip()
        peak = (
            CGROUPS / "memory" / "libpod_parent" / f"libpod-{whole}" / "memory.max_usage_in_bytes"
        )
        return {"first_answer_seconds": seconds, "peak_bytes": int(peak.read_text())}


def try_the_image(bundle: Path) -> list[tuple[str, str]]:
    """Ask the health check and drain a container, and return what was seen."""
    with container(("--network", "none", "--volume", f"{bundle}:/bundle/models:ro"), ()) as name:
        check = ["podman", "--runtime", "runc", "healthcheck", "run", name]
        until = time.monotonic() + 60
        while subprocess.run(check, capture_output=True, check=False).returncode:
            assert time.monotonic() < until, "the health check fails"
            time.sleep(0.1)
    options, command, url = prejit(bundle)(free_port())
    texts: list[str] = []
    with container(options, command, *LIMITS) as name:
        first_answer(url)
        asked = threading.Thread(target=lambda: texts.append(ask(url, MANY)))
        asked.start()
        time.sleep(0.2)
        began = time.perf_counter()
        run("podman", "--runtime", "runc", "stop", "--time", "60", name, quiet=True)
        stopped = time.perf_counter() - began
        asked.join()
        (status,) = run(
            "podman", "inspect", "--format", "{{.State.ExitCode}}", name, quiet=True
        ).split()
    assert texts, "a request was lost"
    assert status == "0", f"exit status {status}"
    return [
        ("health check", "healthy"),
        (
            "a request of 400 tokens when SIGTERM comes",
            f"answered; status {status} after {stopped:.2f} s",
        ),
    ]


def main() -> None:
    """Build the image, measure, and write the page."""
    parser = option_parser()
    parser.add_argument("bundle", type=Path, help="the demo bundle")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--python", help="a base image with Python, instead of one that is made here"
    )
    parser.add_argument("--trial", action="store_true", help="write nothing")
    options = parser.parse_args()
    bundle = options.bundle.resolve()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if options.python is None:
            progress("base image")
            make_base(directory)
        progress("image")
        make_image(options.python or BASE)
        cache = directory / "jax-cache"
        cache.mkdir()
        cache.chmod(0o777)
        rows = {"prejit": prejit(bundle), "JAX, warm cache": plain_jax(cache)}
        samples: dict[str, list[Sample]] = {row: [] for row in rows}
        texts: set[str] = set()
        measure(rows["JAX, warm cache"], set())  # compiles
        facts = begin(options.rounds)
        for turn in range(options.rounds):
            for row, start in rows.items():
                progress(f"round {turn + 1}: {row}")
                samples[row].append(measure(start, texts))
        assert len(texts) == 1, f"the answers differ: {texts}"
        seen = try_the_image(bundle)
    facts["samples"] = samples
    ours, theirs = (median(found, "first_answer_seconds") for found in samples.values())
    table = Table(
        "From `podman run` to the first answer, one CPU and 512 MB",
        ("", "seconds", "peak memory, MB"),
        [
            (row, cell(found, "first_answer_seconds"), cell(found, "peak_bytes", 0, 1e6))
            for row, found in samples.items()
        ],
        f"prejit takes {ours / theirs:.2f} of the time of JAX. Both give the same tokens. Memory is that of "
        "the control group, with pages of files.",
    )
    size = int(run("podman", "image", "inspect", "--format", "{{.Size}}", IMAGE, quiet=True))
    tried = Table("The image", ("", ""), [("size", f"{size / 1e6:.0f} MB"), *seen])
    publish(facts, "container-start", "A container's start", [table, tried], is_trial=options.trial)


if __name__ == "__main__":
    main()
