"""The connection to a cluster: the death of a node is not taken for a crash that the job caused."""

import time

import pytest

from prejit.compiler.cluster import connection
from prejit.compiler.cluster.connection import Ended, RayConnection
from prejit.compiler.cluster.node import Order
from prejit.compiler.compile.compile_jobs import Source
from prejit.compiler.compile.schedule import Loss, Need
from prejit.compiler.targets.target_table import target

from .fake_ray import ERRORS, Cluster

V3, NO_PLACE = target("cpu-x86-64-v3"), (None, None, None)
ORDER = Order(7, V3, (), 1, None, None, Source("x", ()), {}, *NO_PLACE, 60.0)


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(connection, "_DOUBT_SECONDS", 60.0)
    return Cluster().installed(monkeypatch)


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
