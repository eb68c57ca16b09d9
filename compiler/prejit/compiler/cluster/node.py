"""Compile one program on a cluster node, with the toolchain that the build asks for.

The code is the build's own: Ray sends it. So a node compiles with exactly the code that is in the key. Its
Python needs the packages that this code imports, `pip install 'prejit[compiler,ray,store]'`; jax comes from
there if it has the right version, and else from a pinned environment, which the node makes once.
"""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from prejit.compiler import progress
from prejit.compiler.base.process_errors import plain_error
from prejit.compiler.compile.compile_jobs import Source
from prejit.compiler.compile.worker_process import WorkerKilledError, WorkerProcess
from prejit.compiler.sharing.remote import Remote, RemoteError
from prejit.compiler.sharing.shared_result import UnusableError, fetch_content, send_content
from prejit.compiler.sharing.sharing_settings import read_stores
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.compiler.targets.build_host import host_cpu, host_features
from prejit.compiler.targets.environments import spec_for
from prejit.compiler.targets.installing import make_environment
from prejit.compiler.targets.target_classes import Target
from prejit.compiler.targets.toolchain import Toolchain, Tuned, host_toolchain, toolchain_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import BuildError, PrejitError, StoreError

_COUNTED = ("CUBLAS_", "JAX_", "LIBTPU_", "NVIDIA_TF32", "TF_", "XLA_")
"""Prefixes of variables that may change what compilers do: a node takes them from the build."""


@dataclass(frozen=True)
class Order:
    """One attempt at a job, as the build sends it to a node.

    Attributes:
        attempt: its number in the schedule.
        target: what to compile for.
        versions: names and versions of the packages that must compile.
        cpus: number of CPUs that XLA must see; None: it compiles for no CPU.
        tuned: measurements of `prejit tune`; None: none.
        host: the CPU of the build's machine, where the compiler takes it from its own; None: it does not.
        source: the program.
        variables: the build's environment variables that count.
        store: address of the shared store; None: `root` is the build's own cache.
        root: directory of the build cache; None: the node's own.
        environments: directory of pinned environments; None: the node's own.
        timeout_seconds: time limit.
    """

    attempt: int
    target: Target
    versions: tuple[tuple[str, str], ...]
    cpus: int | None
    tuned: Tuned | None
    host: tuple[str, ...] | None
    source: Source
    variables: dict[str, str]
    store: str | None
    root: str | None
    environments: str | None
    timeout_seconds: float


def inputs_of(source: Source) -> tuple[str, ...]:
    """Return the digests of the contents that a node needs to compile a program."""
    return (source.program, *(() if source.kernels is None else (source.kernels.digest,)))


def open_exchange(address: str) -> Remote:
    """Return the shared store at an address, through which the build and its nodes send each other contents.

    Only the build writes results, because it alone has the key that signs them.
    """
    return read_stores(address).tiers[0].remote


def send(remote: Remote, store: DirectoryStore, *digests: str) -> None:
    """Write contents to the shared store, unless it has them.

    Raises:
        StoreError: it does not answer, or the contents are missing here.
    """
    with _exchanging(remote):
        for digest in digests:
            if send_content(remote, store, digest) is None:
                raise StoreError(
                    f"{store.root}: expected blob {digest} in the build cache, found none"
                )


def bring(remote: Remote, store: DirectoryStore, *digests: str) -> None:
    """Read contents from the shared store, unless they are here.

    Raises:
        StoreError: it does not answer, lacks the contents, or has others.
    """
    with _exchanging(remote):
        for digest in digests:
            if store.blob_path(digest) is None and not fetch_content(remote, store, digest):
                raise StoreError(f"{remote.name}: expected {digest}, found none")


@contextmanager
def _exchanging(remote: Remote) -> Iterator[None]:
    hint = "a cluster needs a shared store that the build and all nodes reach"
    try:
        yield
    except RemoteError as error:
        raise StoreError(str(error), hint=hint) from error
    except UnusableError as error:
        raise StoreError(f"{remote.name}: {error}", hint=hint) from error


def counted_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that may change what a compiler does."""
    return {name: value for name, value in environ.items() if name.startswith(_COUNTED)}


def own_cpu() -> tuple[str, ...]:
    """Return what a compiler that compiles for its own machine may know of it."""
    return (host_cpu(), *host_features())


def compile_on_node(order: Order, tell: Callable[[int, str], object]) -> dict[str, Any]:
    """Compile a program and send its executable.

    Returns:
        `{"result": the JSON of a Compiled, "node": name}`; `{"killed": reason}`; `{"error": {...}}`; or
        `{"other": name}`, where the code would depend on this node's CPU, which is not the build's.
    """
    if order.host is not None and order.host != own_cpu():
        return {"other": _name()}
    try:
        store = _open(order.root)
        remote = None if order.store is None else open_exchange(order.store)
        if remote is not None:
            bring(remote, store, *inputs_of(order.source))
        toolchain = _toolchain(order)
        worker = _worker(toolchain, store, order)
        tell(order.attempt, _name())
        compiled = worker.compile(order.source, toolchain, order.timeout_seconds)
        # On the node's own stderr, which Ray keeps: the build may never see the answer.
        versions = _shown(dict(order.versions), order.cpus)
        progress.tell(f"compiled {order.source.program} for {order.target.name} ({versions})")
        if remote is not None:
            send(remote, store, compiled.executable.digest)
    except WorkerKilledError as error:
        return {"killed": str(error)}
    except PrejitError as error:
        return {"error": plain_error(error)}
    return {"result": json.loads(to_json(compiled)), "node": _name()}


@cache
def _name() -> str:
    return socket.gethostname() or "without a name"


@cache
def _open(root: str | None) -> DirectoryStore:
    return DirectoryStore.open(None if root is None else Path(root))


def _toolchain(order: Order) -> Toolchain:
    """Return what compiles on this node; its environment is made first if it is not there."""
    if order.environments is not None:
        os.environ["PREJIT_ENVIRONMENTS"] = order.environments
    expected, where = dict(order.versions), f"node {_name()}"
    if platform.machine() != order.target.architecture:
        raise BuildError(
            f"{where}: expected an {order.target.architecture} machine, found {platform.machine()}"
        )
    target = order.target
    if target.platform == "cpu" and not target.constraints and _installed(expected) == expected:
        found = host_toolchain(target, expected)
    else:
        spec = spec_for(replace(target, jax=expected["jax"]), "")
        assert spec is not None
        found = toolchain_of(target, make_environment(spec))
    if dict(found.versions) != expected or found.cpus != order.cpus:
        raise BuildError(
            f"{where}: expected {_shown(expected, order.cpus)}, "
            f"found {_shown(dict(found.versions), found.cpus)}",
            hint="nodes must be able to compile as the build's machine does: use the same image",
        )
    return replace(found, tuned=order.tuned)


def _installed(names: dict[str, str]) -> dict[str, str]:
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _shown(versions: dict[str, str], cpus: int | None) -> str:
    listed = ", ".join(f"{name} {number}" for name, number in sorted(versions.items()))
    return listed if cpus is None else f"{listed}, {cpus} CPUs that XLA sees"


_KEPT = 3
"""Number of workers that a node keeps for a core. Each takes 0.5 s to start, and 60 MB."""
_workers: list[WorkerProcess] = []  # the last used one comes last


def _worker(toolchain: Toolchain, store: DirectoryStore, order: Order) -> WorkerProcess:
    """Return a worker that serves a toolchain. A build has one or two of jax, in any order."""
    found = next((each for each in _workers if each.serves(toolchain)), None)
    if found is not None:
        _workers.remove(found)
        if not found.alive:
            found.release()
            found = None
    if found is None:
        while len(_workers) >= _KEPT:
            _workers.pop(0).release()
        own = {name: value for name, value in os.environ.items() if not name.startswith(_COUNTED)}
        found = WorkerProcess(toolchain, store, own | order.variables)
    _workers.append(found)
    return found
