"""The connection to a cluster: the death of a node is not taken for a crash that the job caused."""

import sys
import time
from types import SimpleNamespace

import pytest

from prejit.compiler.cluster import connection
from prejit.compiler.cluster.connection import Board, Ended, RayConnection
from prejit.compiler.cluster.node import Order
from prejit.compiler.compile.compile_jobs import Source
from prejit.compiler.compile.schedule import Loss, Need
from prejit.compiler.targets.target_table import target


class RayError(Exception):
    """As ray.exceptions has it."""


NAMES = "OutOfMemory NodeDied ObjectLost WorkerCrashed RaySystem RayTask RuntimeEnvSetup"
ERRORS = {f"{name}Error": type(name, (RayError,), {}) for name in NAMES.split()}


class Remote:
    """What `ray.remote` returns: it notes a call under a new reference."""

    def __init__(self, call):
        self.remote = call

    def options(self, **given):
        return self


class Cluster:
    """Stands for the module `ray`, and for nodes that live as long as a test says."""

    def __init__(self):
        self.alive = {"a", "b"}
        self.outcomes = {}
        self.board = Board()
        self.handed = []
        self.exceptions = SimpleNamespace(RayError=RayError, **ERRORS)

    def remote(self, what):
        if what is Board:
            return Remote(lambda: SimpleNamespace(news=Remote(self._news)))
        return Remote(self._hand)

    def _hand(self, order, board):
        self.handed.append(f"attempt {order.attempt}")
        return self.handed[-1]

    def _news(self):
        self.outcomes["news"] = self.board.news()
        return "news"

    def is_initialized(self):
        return True

    def nodes(self):
        same = {"Resources": {"CPU": 1.0}, "NodeManagerAddress": "127.0.0.1"}
        return [{"NodeID": name, "Alive": name in self.alive, **same} for name in "abc"]

    def wait(self, refs, **given):
        return [each for each in refs if each in self.outcomes], []

    def get(self, ref):
        if isinstance(found := self.outcomes.pop(ref), Exception):
            raise found
        return found

    def cancel(self, ref, *, force):
        self.handed.remove(ref)


V3, NO_PLACE = target("cpu-x86-64-v3"), (None, None, None)
ORDER = Order(7, V3, (), 1, None, None, Source("x", ()), {}, *NO_PLACE, 60.0)


@pytest.fixture
def cluster(monkeypatch):
    made = Cluster()
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setattr(connection, "_keep_stdout_for_data", lambda: None)
    monkeypatch.setattr(connection, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(connection, "_DOUBT_SECONDS", 60.0)
    return made


@pytest.fixture
def ray(cluster):
    """A connection with one attempt, number 7, that was handed to the cluster."""
    made = RayConnection("ray://auto")
    made.size()
    made.start(ORDER, Need(1.0))
    return made


def test_a_loss_counts_against_the_job_unless_its_node_died(cluster, ray, monkeypatch):
    """A job may end two workers, and five nodes. Ray notices the death of the node seconds later."""
    for error, loss in (
        *(("NodeDiedError", Loss.NODE), ("ObjectLostError", Loss.NODE)),
        ("OutOfMemoryError", Loss.MEMORY),
    ):
        cluster.outcomes["attempt 7"] = ERRORS[error]("gone")
        assert ray.wait(0.0) == [Ended(7, loss=loss)]
        ray.start(ORDER, Need(1.0))
    for error in ("WorkerCrashedError", "RaySystemError"):
        cluster.alive = {"a", "b"}
        cluster.board.take(7, "b")
        assert ray.begun() == []
        cluster.outcomes["attempt 7"] = ERRORS[error]("the raylet was killed")
        assert [ray.wait(0.0), ray.wait(0.0)] == [[], []], "nothing is known yet"
        cluster.alive = {"a", "c"}
        assert ray.wait(0.0) == [Ended(7, loss=Loss.NODE)]
        assert ray.wait(0.0) == []
        cluster.alive = {"a", "b"}
        ray.start(ORDER, Need(1.0))
    monkeypatch.setattr(connection, "_DOUBT_SECONDS", 0.2)
    cluster.board.take(7, "b")
    ray.begun()
    cluster.outcomes["attempt 7"] = ERRORS["WorkerCrashedError"]()
    cluster.alive = {"b"}  # another node died at the same time; that is no excuse
    assert ray.wait(0.0) == []
    time.sleep(0.25)
    assert ray.wait(0.0) == [Ended(7, loss=Loss.WORKER)]


def test_what_ray_cannot_run_is_an_error_of_the_job(cluster, ray):
    """A connection that breaks is not: each job would say that Ray cannot run it."""
    cluster.outcomes["attempt 7"] = {"result": 1}
    assert ray.wait(0.0) == [Ended(7, body={"result": 1})]
    no_module, cannot = "ModuleNotFoundError: no iced", "a node of the cluster cannot compile: "
    for kind, text, said, hint in (
        ("RuntimeEnvSetupError", "no such package", "Ray could not run it: no such package", ""),
        ("RayTaskError", f"x\n{no_module}", f"{cannot}{no_module}", "pip"),
    ):
        ray.start(ORDER, Need(1.0))
        cluster.outcomes["attempt 7"] = ERRORS[kind](text)
        [ended] = ray.wait(0.0)
        assert ended.loss is None
        assert str(ended.failure) == said
        assert hint in str(ended.failure and ended.failure.hint)
    ray.start(ORDER, Need(1.0))
    cluster.outcomes["attempt 7"] = ConnectionError("GRPC connection failed")
    with pytest.raises(ConnectionError):
        ray.wait(0.0)
