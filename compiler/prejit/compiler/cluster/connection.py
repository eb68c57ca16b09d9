"""A connection to a Ray cluster: tasks go there, and what became of them comes back.

`ray://HOST:PORT` is the address of Ray Client on the head node. `ray://auto` is the cluster that this machine
is a node of, that RAY_ADDRESS names, or that this process is connected to already.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from prejit.compiler.cluster.node import Order, compile_on_node
from prejit.compiler.compile.schedule import Loss, Need
from prejit.runtime.errors import BuildError, NetworkError, UsageError

SCHEME = "ray://"
"""How the address of a Ray cluster begins."""
_LOCAL = "auto"
_CURRENT = Path("/tmp/ray/ray_current_cluster")  # noqa: S108
"""The file in which `ray start` notes the address of this machine's cluster."""
_ANSWER_SECONDS = 3.0
"""How long the head node may take to accept a connection. Ray itself would wait for minutes."""
_END_SECONDS = 10.0
"""How long cancelled tasks may take to end."""
_DOUBT_SECONDS = 30.0
"""A node that is alive so long after its worker has died lives on. Ray notices the death of a node after 5
checks, one every 3 s, which begin 5 s after the node has joined."""
_LOOK_SECONDS = 1.0
"""Interval at which the cluster is asked meanwhile which nodes live."""


@dataclass(frozen=True)
class Ended:
    """The end of an attempt: what `compile_on_node` returned, why it was lost, or why none can succeed."""

    attempt: int
    body: dict[str, Any] | None = None
    loss: Loss | None = None
    failure: BuildError | None = None


@dataclass(frozen=True)
class Size:
    """The size of a cluster: cores of all nodes, of the largest one, the largest memory, all addresses."""

    cores: int
    node_cores: int
    node_bytes: int
    addresses: frozenset[str]


class Board:
    """An actor on which nodes note the attempts that they have taken and begun."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, str]] = []
        self._begun: list[tuple[int, str]] = []

    def take(self, attempt: int, node: str) -> None:
        """Note that a node, by its number in the cluster, has taken an attempt."""
        self._taken.append((attempt, node))

    def begin(self, attempt: int, node: str) -> None:
        """Note that a node, by its name for people, compiles."""
        self._begun.append((attempt, node))

    def news(self) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        """Return what is new: the attempts that were taken, and those that were begun."""
        found = self._taken, self._begun
        self._taken, self._begun = [], []
        return found


@dataclass
class _Running:
    """An attempt that was handed to the cluster.

    Attributes:
        attempt: its number.
        nodes: the nodes that lived then; once one has taken it, that one alone.
        until: if its worker died, when its node counts as alive although no death was noticed.
    """

    attempt: int
    nodes: frozenset[str]
    until: float = 0.0


def run_order(order: Order, board: Any) -> dict[str, Any]:
    """Run one attempt, as a task of Ray."""
    import ray

    board.take.remote(order.attempt, ray.get_runtime_context().get_node_id())
    return compile_on_node(order, board.begin.remote)


def check_address(address: str) -> None:
    """Check the address of an executor, and that Ray is installed."""
    if not address.startswith(SCHEME) or address == SCHEME:
        raise UsageError(
            f"executor: expected local, {SCHEME}HOST:PORT or {SCHEME}{_LOCAL}, found {address!r:.80}"
        )
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            f"executor {address}: expected the package ray, found none",
            hint="pip install 'prejit[ray]'",
        )


@final
class RayConnection:
    """A connection to a cluster. One thread uses it."""

    def __init__(self, address: str) -> None:
        """Connect, and send the cluster this build's own code.

        Args:
            address: begins with `ray://`.

        Raises:
            NetworkError: nobody answers there.
            BuildError: the cluster has another version of Python or Ray.
        """
        _require_answer(address)
        import ray

        self._ray: Any = ray
        _keep_stdout_for_data()
        environment = {"py_modules": _own_code(), "excludes": ["**/__pycache__"]}
        self._connects = not ray.is_initialized()
        if self._connects:
            place = address if address != SCHEME + _LOCAL else _LOCAL
            quiet = {"log_to_driver": False, "configure_logging": False}
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Ray's own, of versions to come
                    ray.init(address=place, runtime_env=environment, **quiet)
            except (ConnectionError, TimeoutError) as error:
                raise _unreachable(address, str(error)) from error
            except RuntimeError as error:
                first = " ".join(str(error).split())
                raise BuildError(
                    f"executor {address}: the cluster cannot run this build: {first:.400}",
                    hint="use the Python and Ray of the cluster's nodes; prejit itself is sent to them",
                ) from error
        # In a connection of the caller's, tasks have to name the code by themselves.
        options: dict[str, Any] = {} if self._connects else {"runtime_env": environment}
        # Losses are for the schedule to count.
        self._task: Any = ray.remote(run_order)
        self._options: dict[str, Any] = {"max_retries": 0, **options}
        head = {"node:__internal_head__": 0.001}  # the last node to go
        board = ray.remote(Board).options(num_cpus=0, max_restarts=-1, resources=head, **options)
        self._board: Any = board.remote()
        self._news: Any = None
        self._running: dict[Any, _Running] = {}
        self._doubts: list[_Running] = []  # their worker died, perhaps because their node did
        self._alive = frozenset[str]()  # numbers of the nodes that lived when it was last asked
        self._looked = 0.0

    def size(self) -> Size:
        """Return the size of the cluster now."""
        nodes = self._live_nodes()
        cores = [int(each["Resources"].get("CPU", 0)) for each in nodes]
        memory = [int(each["Resources"].get("memory", 0)) for each in nodes]
        addresses = frozenset(each["NodeManagerAddress"] for each in nodes)
        return Size(sum(cores), max(cores, default=0), max(memory, default=0), addresses)

    def start(self, order: Order, need: Need) -> None:
        """Hand an attempt to the cluster, which starts it when a node has room."""
        task = self._task.options(
            num_cpus=need.cores, memory=need.bytes, name=order.target.name, **self._options
        )
        self._running[task.remote(order, self._board)] = _Running(order.attempt, self._alive)

    def cancel(self, attempt: int) -> None:
        """End an attempt. No answer comes."""
        self._doubts = [each for each in self._doubts if each.attempt != attempt]
        for each, running in list(self._running.items()):
            if running.attempt == attempt:
                del self._running[each]
                self._ray.cancel(each, force=True)

    def wait(self, seconds: float) -> list[Ended]:
        """Return the attempts that have ended, once there is one or the time is over.

        Raises:
            ConnectionError: the cluster does not answer any more.
        """
        ready: list[Any] = []
        if self._running:
            ready, _ = self._ray.wait(list(self._running), timeout=seconds)
        elif self._doubts:
            time.sleep(seconds)
        if ready:  # with the first come all others
            ready, _ = self._ray.wait(
                list(self._running), num_returns=len(self._running), timeout=0
            )
        answers = [self._answer(each, self._running.pop(each)) for each in ready]
        return [each for each in answers if each is not None] + self._resolved()

    def begun(self) -> list[tuple[int, str]]:
        """Return the attempts that began since the last call, each with its node."""
        exceptions = self._ray.exceptions
        if self._news is None:
            self._news = self._board.news.remote()
        try:
            ready, _ = self._ray.wait([self._news], timeout=0)
            if not ready:
                return []
            taken, begun = self._ray.get(ready[0])
        except exceptions.RayError:  # it starts again elsewhere; nobody depends on it
            taken, begun = [], []
        self._news = None
        nodes = dict(taken)
        for running in (*self._running.values(), *self._doubts):
            if running.attempt in nodes:
                running.nodes = frozenset({nodes[running.attempt]})
        return begun

    def close(self) -> None:
        """End all attempts, and leave the cluster."""
        left = list(self._running)
        self._running.clear()
        self._doubts.clear()
        with ExitStack() as at_end:  # each step, also where one before it fails
            if self._connects:
                at_end.callback(self._ray.shutdown)
            at_end.callback(self._ray.kill, self._board)
            for each in left:
                self._ray.cancel(each, force=True)
            if left:
                self._ray.wait(left, num_returns=len(left), timeout=_END_SECONDS)

    def _answer(self, ended: Any, running: _Running) -> Ended | None:
        """Return how an attempt ended; None: its worker died, and perhaps its node."""
        exceptions, attempt = self._ray.exceptions, running.attempt
        try:
            body: dict[str, Any] = self._ray.get(ended)
        except exceptions.OutOfMemoryError:
            return Ended(attempt, loss=Loss.MEMORY)
        except (exceptions.NodeDiedError, exceptions.ObjectLostError):
            return Ended(attempt, loss=Loss.NODE)
        except (exceptions.WorkerCrashedError, exceptions.RaySystemError):
            # Ray says the same of a node whose worker dies a moment before it.
            running.until = time.monotonic() + _DOUBT_SECONDS
            self._doubts.append(running)
            return None
        except exceptions.RayTaskError as error:
            return Ended(attempt, failure=_of_the_node(error))
        except exceptions.RayError as error:
            first = " ".join(str(error).split())
            return Ended(attempt, failure=BuildError(f"Ray could not run it: {first:.400}"))
        return Ended(attempt, body=body)

    def _resolved(self) -> list[Ended]:
        """Return the attempts whose worker died, once it is known whether their node died, too."""
        now = time.monotonic()
        if not self._doubts or now - self._looked < _LOOK_SECONDS:
            return []
        self._live_nodes()
        died = [each for each in self._doubts if not each.nodes <= self._alive]
        ended = [each for each in self._doubts if each in died or now > each.until]
        self._doubts = [each for each in self._doubts if each not in ended]
        return [
            Ended(each.attempt, loss=Loss.NODE if each in died else Loss.WORKER) for each in ended
        ]

    def _live_nodes(self) -> list[dict[str, Any]]:
        nodes = [each for each in self._ray.nodes() if each["Alive"]]
        self._alive = frozenset(each["NodeID"] for each in nodes)
        self._looked = time.monotonic()
        return nodes


def _require_answer(address: str) -> None:
    """Check that somebody listens at the address of a cluster."""
    place = address.removeprefix(SCHEME)
    if place == _LOCAL:
        import ray

        if ray.is_initialized():
            return
        place = os.environ.get("RAY_ADDRESS", "")
        if not place or place == _LOCAL:
            place = _CURRENT.read_text().strip() if _CURRENT.is_file() else ""
        if not place:
            raise _unreachable(address, "no cluster runs on this machine")
        place = place.removeprefix(SCHEME)
    host, _, port = place.partition("/")[0].rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"executor {address}: expected HOST:PORT, found {place!r:.80}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, f"{place}: {error}") from error


def _keep_stdout_for_data() -> None:
    """Stop Ray from printing the cluster's events on stdout (ray 2.60). What matters is in the progress."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        vars(worker)["print_to_stdstream"] = lambda *given, **named: None


def _unreachable(address: str, reason: str) -> NetworkError:
    first = reason.partition("\n")[0]
    return NetworkError(
        f"executor {address}: expected a Ray cluster, found none: {first:.300}",
        hint="start one with `ray start --head`, or name the head node and the port of Ray Client (10001)",
    )


def _own_code() -> list[str]:
    """Return the directories of the package `prejit`: two in a checkout, and one where it is installed."""
    found = []
    for root in ("prejit.compiler", "prejit.runtime"):
        spec = importlib.util.find_spec(root)
        assert spec is not None
        assert spec.origin is not None
        found.append(str(Path(spec.origin).resolve().parents[1]))
    return list(dict.fromkeys(found))


def _of_the_node(error: Exception) -> BuildError:
    """Return the error for an exception on a node that no job caused."""
    last = str(error).strip().splitlines()[-1]
    hint = None
    if "ModuleNotFoundError" in last or "ImportError" in last:
        hint = "install the packages on all nodes: pip install 'prejit[compiler,ray,store]'"
    return BuildError(f"a node of the cluster cannot compile: {last:.400}", hint=hint)
