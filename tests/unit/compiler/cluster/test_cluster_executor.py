"""The executor of a cluster, with a cluster that does what a test says: no job waits for ever."""

import io
import json
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace

import pytest
from tests.unit.compiler.toolchains import V3, new, old
from tests.waiting import wait_for

from prejit.compiler.cluster import cluster_executor, connection
from prejit.compiler.cluster.cluster_executor import ClusterExecutor
from prejit.compiler.cluster.connection import check_address
from prejit.compiler.cluster.node import bring, inputs_of, open_exchange, send
from prejit.compiler.compile.compile_jobs import Compiled, CompileJob, Source, find_compiled
from prejit.compiler.progress import Plain, Progress, Quiet
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import BuildError, StoreError, UsageError
from prejit.runtime.format.bundle_schema import Memory, Segment

from .fake_ray import ERRORS, Cluster


def compiled_by(store, order):
    program = store.read_blob(order.source.program)
    content = program * 2
    digest = store.put_blob(content)
    segment = Segment(0, len(content), digest, len(content), digest)
    compiled = Compiled(segment, ("avx2",), Memory(1, 2, 3, 4), 5, 5, 1 << 20)
    return {"result": json.loads(to_json(compiled)), "node": "node7"}


@dataclass
class Site:
    store: DirectoryStore
    patch: pytest.MonkeyPatch
    progress: Progress = field(default_factory=Quiet)

    def cluster(self, *behave):
        return Cluster(*behave).installed(self.patch)

    def executor(self, shared=None):
        options = {"shared": shared, "workers": 1, "progress": self.progress}
        return ClusterExecutor("ray://auto", self.store, **options)

    def job(self, program):
        digest = self.store.put_blob(program.encode())
        key = Key("compile", program, (("program", program),))
        return CompileJob(program, new(V3), Source(digest, ()), key)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.delenv("PREJIT_STORE", raising=False)
    monkeypatch.setattr(cluster_executor, "check_address", lambda address: None)
    return Site(DirectoryStore.open(tmp_path / "cache"), monkeypatch)


def test_a_job_is_compiled_on_the_cluster_once_by_a_node_that_is_named(site):
    """Also where the cluster does not say that it began."""
    cluster = site.cluster(lambda order: compiled_by(site.store, order))
    jobs, stream = [site.job(f"p{number}") for number in range(20)], io.StringIO()
    with Plain(stream) as site.progress, site.executor() as executor:
        futures = [executor.submit(job) for job in jobs]
        results = [future.result(60) for future in futures]
        assert executor.submit(jobs[0]).result(60) == results[0], "the second comes from the store"
        assert executor.compiled == {job.key.digest for job in jobs}
    assert len(cluster.orders) == 20
    assert [find_compiled(site.store, job.key) for job in jobs] == results
    assert cluster.is_closed
    [shown] = [line for line in stream.getvalue().splitlines() if line.startswith("compiled p7 ")]
    assert shown.startswith("compiled p7 for cpu-x86-64-v3 on node7 in ")


def test_a_job_that_does_not_compile_or_kills_its_workers_is_named(site):
    site.patch.setattr(connection, "_DOUBT_SECONDS", 0.0)
    error = {"code": BuildError.code, "message": "no such operation", "hint": "change it"}
    for ended, count, said, hint in (
        ({"error": error}, 1, "p for cpu-x86-64-v3: no such operation", "change it"),
        (ERRORS["WorkerCrashedError"](), 2, "2 attempts ended without", "--executor local"),
    ):
        cluster = site.cluster(lambda order, ended=ended: ended)
        with site.executor() as executor, pytest.raises(BuildError, match=said) as caught:
            executor.submit(site.job("p")).result(60)
        assert hint in caught.value.hint
        assert len(cluster.orders) == count


def test_no_job_waits_for_a_cluster_that_is_closed_or_gone(site):
    for broken, error in ((False, CancelledError), (True, BuildError)):
        cluster = site.cluster()
        with site.executor() as executor:
            futures = [executor.submit(site.job(f"p{number}")) for number in range(30)]
            wait_for(lambda found=cluster: found.orders)
            cluster.broken = broken
            if broken:
                with pytest.raises(BuildError, match="does not answer any more"):
                    futures[0].result(60)
                futures.append(executor.submit(site.job("later")))
        for future in futures:
            with pytest.raises(error):
                future.result(60)
        assert cluster.running == [], "all were cancelled"
        assert cluster.is_closed, "its actor has ended, too where nobody answers"


def test_other_machines_exchange_all_through_a_shared_store(site, tmp_path):
    elsewhere = "192.0.2.99"
    cluster = site.cluster(lambda order: None, elsewhere)
    said = r"expected a shared store.*192\.0\.2\.99"
    with site.executor() as executor, pytest.raises(UsageError, match=said):
        executor.submit(site.job("p"))
    assert cluster.is_closed
    shared, node = str(tmp_path / "shared"), DirectoryStore.open(tmp_path / "node")
    remote = open_exchange(shared)

    def behave(order):
        assert (order.store, order.root) == (shared, None)
        for digest in inputs_of(order.source):
            bring(remote, node, digest)
        answer = compiled_by(node, order)
        send(remote, node, answer["result"]["executable"]["digest"])
        return answer

    site.cluster(behave, elsewhere)
    with site.executor(shared) as executor:
        found = executor.submit(site.job("p")).result(60)
    assert site.store.read_blob(found.executable.digest) == b"pp"


def test_code_for_this_cpu_is_not_taken_from_a_node_with_another(site):
    job = replace(site.job("p"), toolchain=old(V3))
    cluster = site.cluster(lambda order: {"other": "node7"})
    executor, here = site.executor(), Future()
    here.set_result("compiled here")
    site.patch.setattr(executor._here, "submit", lambda job: here)
    with executor:
        assert executor.submit(job).result(60) == "compiled here"
        assert executor.submit(replace(job, program="q")).result(60) == "compiled here"
    assert len(cluster.orders) == 1, "the second job does not ask again"
    assert cluster.orders[0].host is not None


def test_contents_must_be_those_that_were_asked_for(tmp_path):
    remote, store = open_exchange(str(tmp_path / "s")), DirectoryStore.open(tmp_path / "c")
    digest = digest_of(b"good")
    remote.write(f"cas/{digest.removeprefix('sha256:')}", b"bad")
    for wanted, said in ((digest, "expected this digest"), (digest_of(b"other"), "found none")):
        with pytest.raises(StoreError, match=said):
            bring(remote, store, wanted)
        assert store.blob_path(wanted) is None


def test_an_address_that_is_none_is_refused(monkeypatch):
    for address in ("slurm", "ray://", "http://a:1", "Ray://a:1"):
        with pytest.raises(UsageError, match="expected local, ray://HOST:PORT or ray://auto"):
            check_address(address)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        check_address("ray://head:10001")
    assert caught.value.hint == "pip install 'prejit[ray]'"
