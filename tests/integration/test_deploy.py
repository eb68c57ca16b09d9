"""deploy/: Helm's chart, KServe, units of systemd, the script of CIs and that of Slurm, as they run."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file, save_file
from tests.fake_kubernetes import fake_kubernetes
from tests.lettered import write_lettered
from tests.manifests import write_manifest
from tests.ports import free_port
from tests.processes import ran
from tests.waiting import wait_for

from prejit.runtime.__main__ import main

from .test_serve import INFER, infer

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "kubernetes" / "chart"
TOOLS = ROOT / ".venv-tools" / "bin"
KUBERNETES = "1.36"
PULLED = {"from": "pull", "reference": "oci://registry.example.com/models/demo:prod"}
CLAIMED = {"from": "claim", "claim": "bundles"}
FORMS = {
    "volume": {},
    "pull": {"bundle": PULLED},
    "claim": {"bundle": CLAIMED, "autoscaling": {"enabled": False}},
}
HELM = """
import asyncio, json, sys
import helm_sdkpy
async def install(chart, values, kubeconfig):
    config = helm_sdkpy.Configuration(kubeconfig=kubeconfig)
    linted = await helm_sdkpy.Lint(config).run(chart)
    try:
        install = helm_sdkpy.Install(config)
        release = await install.run("prejit", chart, values=values, wait=False)
        return [linted["Messages"], release["manifest"]]
    except helm_sdkpy.InstallError as error:
        return [linted["Messages"], str(error)]
async def main():
    return [await install(*each) for each in json.loads(sys.argv[1])]
print(json.dumps(asyncio.run(main())))
"""
CHECK = """
import json, sys
import kubernetes_validate
from cloudcoil.models.keda.v1alpha1 import ScaledObject
version, objects = json.loads(sys.argv[1])
for each in objects:
    if each["apiVersion"].startswith("keda.sh"):
        read = ScaledObject.model_validate(each).model_dump(mode="json", by_alias=True, exclude_none=True)
        assert read == each, f"fields that KEDA does not have: {each}"
    else:
        kubernetes_validate.validate(each, version, strict=True)
"""

needs_tools_of_3_12 = pytest.mark.skipif(
    not TOOLS.exists() or sys.version_info < (3, 12),
    reason="needs .venv-tools of Python 3.12 or newer: `make .venv-tools/.ready` makes it",
)


def with_tools(code, *values):
    return ran(TOOLS / "python", "-c", code, json.dumps(values)).stdout


def check(objects):
    with_tools(CHECK, KUBERNETES, objects)


def install(*values):
    """Return what the cluster got of the chart with each of the values, and what Helm rendered or said."""
    with contextlib.ExitStack() as stack:
        apis = [stack.enter_context(fake_kubernetes()) for _ in values]
        calls = [(str(CHART), each, api.kubeconfig) for each, api in zip(values, apis, strict=True)]
        linted, rendered = zip(*json.loads(with_tools(HELM, *calls)), strict=True)
        for messages in linted:
            assert all(each["Severity"] < 2 for each in messages), messages  # 1: it has no icon
        objects = [list(api.objects.values()) for api in apis]
        return list(zip(objects, rendered, strict=True))


def one(objects, kind):
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def plain():
    """Return the objects of kustomize's base: the chart with its own values."""
    content = (ROOT / "deploy" / "kubernetes" / "base" / "prejit.yaml").read_text()
    return list(yaml.safe_load_all(content))


def moved(arguments, **places):
    """Return arguments of a container with the paths and ports of this machine."""
    for name, new in places.items():
        old = {"bundle": "/bundle/models", "port": "8000"}[name]
        assert any(old in each for each in arguments), arguments
        arguments = [each.replace(old, str(new)) for each in arguments]
    return arguments


@pytest.mark.thorough
@needs_tools_of_3_12
def test_helm_installs_what_the_schemas_of_kubernetes_and_keda_have():
    installed = dict(zip(FORMS, install(*FORMS.values()), strict=True))
    check([each for objects, _ in installed.values() for each in objects])
    sources = {"volume": "image", "pull": "emptyDir", "claim": "persistentVolumeClaim"}
    for form, source in sources.items():
        objects, _ = installed[form]
        kinds = {"Deployment", "Service", "PodDisruptionBudget", "DaemonSet", "ScaledObject"}
        pod = one(objects, "Deployment")["spec"]["template"]["spec"]
        (bundle,) = [each for each in pod["volumes"] if each["name"] == "bundle"]
        assert set(bundle) == {"name", source}
        assert ("initContainers" in pod) == (form == "pull")
        if form == "claim":
            kinds.remove("ScaledObject")
            assert one(objects, "Deployment")["spec"]["replicas"] == 2
        assert {each["kind"] for each in objects} == kinds
    again = [each for each in yaml.safe_load_all(installed["volume"][1]) if each]
    assert sorted(again, key=json.dumps) == sorted(plain(), key=json.dumps), (
        "write it again, as deploy/kubernetes/base/kustomization.yaml says"
    )


@pytest.mark.thorough
@needs_tools_of_3_12
def test_wrong_values_are_named():
    wrong = {
        'bundle.from: expected volume, pull or claim, found "disk"': {"from": "disk"},
        "bundle.claim: expected the name of a PersistentVolumeClaim": {"from": "claim"},
        "bundle.reference: expected a reference such as oci://": {"from": "pull"},
    }
    values = [{"bundle": bundle} for bundle in wrong.values()]
    for reason, (objects, error) in zip(wrong, install(*values), strict=True):
        assert reason in error
        assert not objects


def is_probed(container, name, port):
    """Return whether a probe succeeds, as the kubelet decides it."""
    probe = container[name]
    path = probe["httpGet"]["path"]
    try:
        found = httpx.get(f"http://127.0.0.1:{port}{path}", timeout=probe.get("timeoutSeconds", 1))
    except httpx.TransportError:
        return False
    return 200 <= found.status_code < 400


def test_the_pods_container_starts_is_probed_and_drains(bundle_dir, serve):
    objects = plain()
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    port = free_port()
    server = serve(*moved(container["args"], bundle=bundle_dir, port=port)[1:], port=port)
    wait_for(lambda: is_probed(container, "startupProbe", port))
    assert is_probed(container, "readinessProbe", port)
    assert is_probed(container, "livenessProbe", port)
    # Clients have the name of the values, which KEDA's query has too.
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    (trigger,) = one(objects, "ScaledObject")["spec"]["triggers"]
    asked = re.fullmatch(r'sum\((\w+)\{model_name="(.*)"\}\)', trigger["metadata"]["query"])
    families = text_string_to_metric_families(metrics)
    samples = [each for family in families for each in family.samples]
    found = [s.value for s in samples if (s.name, s.labels.get("model_name")) == asked.groups()]
    assert found
    assert sum(found) == 0  # nothing waits
    drain = int(container["args"][-1].removeprefix("--drain-seconds="))
    sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] == sleep + drain + 10
    assert infer(server).status_code == 200
    assert server.end(signal.SIGTERM, drain + 10) == 0, server.said


def test_a_node_prints_the_fingerprint_that_fleet_reads(bundle_dir, programs, tmp_path, said):
    pod = one(plain(), "DaemonSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    with subprocess.Popen(container["command"], env=env, stdout=subprocess.PIPE) as printed:
        line = printed.stdout.readline()
        assert printed.poll() is None  # a DaemonSet starts again what ends
        printed.kill()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "node-1.json").write_bytes(line)
    assert "node-1" in said("fleet", bundle_dir, tmp_path / "saved", "--on-mismatch", "error")


@pytest.mark.thorough
@needs_tools_of_3_12
def test_kustomize_changes_image_and_volume(tmp_path):
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which has kustomize")
    shutil.copytree(ROOT / "deploy" / "kubernetes", tmp_path / "kubernetes")
    done = ran("kubectl", "kustomize", tmp_path / "kubernetes" / "claim")
    objects = list(yaml.safe_load_all(done.stdout))
    check(objects)
    assert len(objects) == len(plain())
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    (bundle,) = [each for each in pod["volumes"] if each["name"] == "bundle"]
    claim = {"claimName": "bundles", "readOnly": True}
    assert bundle == {"name": "bundle", "persistentVolumeClaim": claim}
    assert pod["containers"][0]["image"] == "registry.example.com/prejit-server:0.2.0"


@pytest.mark.thorough
def test_kserve_starts_the_runtime_with_the_name_of_the_service(bundle_dir, serve):
    place = ROOT / "deploy" / "kserve"
    runtime = yaml.safe_load((place / "serving-runtime.yaml").read_text())
    service = yaml.safe_load((place / "inference-service.yaml").read_text())
    (container,) = runtime["spec"]["containers"]
    if TOOLS.exists():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "demo"}}
        check([pod | {"spec": {"containers": [container]}}])
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = [each["name"] for each in runtime["spec"]["supportedModelFormats"]]
    assert model["modelFormat"]["name"] in formats
    name = service["metadata"]["name"]
    arguments = [each.replace("{{.Name}}", name) for each in container["args"]]
    assert f"{name}=/mnt/models" in arguments
    port = free_port()
    given = [each.replace("/mnt/models", str(bundle_dir)) for each in arguments[1:]]
    server = serve(*(each.replace("8080", str(port)) for each in given), port=port)
    wait_for(lambda: is_probed(container, "readinessProbe", port))
    assert httpx.get(f"{server.url}/health/ready", timeout=60).json()["models"] == [name]


UNITS = ROOT / "deploy" / "systemd"
SYSTEMD = Path("/lib/systemd/systemd")
EXPOSURE = 20
"""Most exposure that `systemd-analyze security` may see, in tenths. A unit without settings has 96."""
BOOT = """
mount --make-rprivate /
for each in /run /etc/systemd/system /opt /srv /var/cache /var/lib /var/tmp; do
    mount -t tmpfs tmpfs "$each"
done
mkdir -p /opt/prejit/bin /opt/python /opt/packages /opt/runtime /opt/server /srv/models/demo
mount --bind "$BASE" /opt/python
mount --bind "$PACKAGES" /opt/packages
mount --bind "$ROOT/runtime" /opt/runtime
mount --bind "$ROOT/server" /opt/server
mount --bind "$BUNDLE" /srv/models/demo
cp "$ROOT"/deploy/systemd/* /etc/systemd/system/
cat > /opt/prejit/bin/prejit <<END
#!/bin/sh
export PYTHONPATH=/opt/runtime:/opt/server:/opt/packages LD_LIBRARY_PATH=/opt/python/lib
exec /opt/python/bin/$PYTHON -m prejit.runtime "\\$@"
END
chmod 755 /opt/prejit/bin/prejit
cd /etc/systemd/system
mkdir 'prejit@demo.socket.d'
printf '[Socket]\\nListenStream=\\nListenStream=127.0.0.1:%s\\n' "$PORT" > 'prejit@demo.socket.d/port.conf'
mkdir 'prejit@demo.service.d'
printf '[Service]\\nStandardError=append:/run/printed\\n' > 'prejit@demo.service.d/printed.conf'
for each in sysinit basic sockets network shutdown; do
    printf '[Unit]\\nDefaultDependencies=no\\n' > "$each.target"
done
printf '[Unit]\\nDefaultDependencies=no\\nRequires=prejit@demo.socket\\n' > default.target
mount -t tmpfs tmpfs /tmp
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -o remount,bind,ro /
exec env --ignore-environment container=test SYSTEMD_UNIT_PATH=/etc/systemd/system \\
    "$SYSTEMD" --system --log-target=null
"""
"""Starts a systemd that can write to no file of this machine and has no units of Debian, which empty /tmp."""


def can_boot():
    if os.geteuid() != 0 or not SYSTEMD.exists() or shutil.which("unshare") is None:
        return False
    if Path("/proc/1/comm").read_text() == "systemd\n":  # two would share its control groups
        return False
    return ran("unshare", "-pfmC", "--mount-proc", "true", status=None).returncode == 0


@pytest.fixture
def units(tmp_path):
    """The units as instances: systemd-analyze reads no templates."""
    for each in UNITS.iterdir():
        shutil.copy(each, tmp_path / each.name.replace("@", "@demo"))
    service = tmp_path / "prejit@demo.service"
    service.write_text(service.read_text().replace("/opt/prejit/bin/prejit", "/bin/true"))
    return tmp_path


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_units_and_sees_little_exposure(units):
    files = [units / f"prejit@demo.{kind}" for kind in ("service", "socket")]
    assert ran("systemd-analyze", "verify", *files).stderr == ""
    ran("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", files[0])


@dataclass(frozen=True)
class Booted:
    pid: int
    port: int

    def child(self):
        """Return the process id of systemd itself, below that of `unshare`."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return children.split()[0]

    def control(self, *arguments):
        return ran("nsenter", "-t", self.child(), "-a", "systemctl", *arguments).stdout.strip()

    def printed(self):
        file = Path(f"/proc/{self.child()}/root/run/printed")
        return file.read_text() if file.exists() else ""


@pytest.fixture
def booted(bundle_dir):
    port = free_port()
    env = {
        **{"PATH": os.environ["PATH"], "ROOT": str(ROOT), "BUNDLE": str(bundle_dir)},
        **{"BASE": sys.base_prefix, "PACKAGES": sysconfig.get_path("purelib"), "PORT": str(port)},
        **{"PYTHON": Path(os.path.realpath(sys.executable)).name, "SYSTEMD": str(SYSTEMD)},
    }
    command = ["unshare", "-pfmC", "--mount-proc", "--kill-child", "sh", "-ec", BOOT]
    process = subprocess.Popen(command, env=env)
    try:
        yield Booted(process.pid, port)
    finally:
        process.kill()
        process.wait()


@pytest.mark.thorough
@pytest.mark.skipif(not can_boot(), reason="needs root, namespaces and systemd")
def test_a_request_starts_the_hardened_server_and_a_restart_refuses_none(booted):
    url = f"http://127.0.0.1:{booted.port}/v2/models/score/infer"
    statuses = []

    def ask():
        statuses.append(httpx.post(url, json=INFER, timeout=60).status_code)
        return statuses[-1]

    listens = f":{booted.port:04X} 00000000:0000 0A "
    wait_for(lambda: listens in Path("/proc/net/tcp").read_text())
    wait_for(lambda: ask() == 200)
    before = booted.control("show", "-P", "MainPID", "prejit@demo.service")
    is_over = threading.Event()

    def go_on():
        while not is_over.is_set():
            ask()

    asking = threading.Thread(target=go_on)
    asking.start()
    try:
        booted.control("restart", "prejit@demo.service")
        wait_for(lambda: booted.printed().count("ready in") == 2)
    finally:
        is_over.set()
        asking.join()
    assert booted.control("show", "-P", "MainPID", "prejit@demo.service") != before
    # The server that ends and the one that loads answer 503; between them requests wait in the queue.
    assert set(statuses) <= {200, 503}
    assert ask() == 200
    assert booted.control("show", "-P", "NRestarts", "prejit@demo.service") == "0"


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="needs systemd")
@pytest.mark.parametrize("is_datagram", [False, True])
def test_another_socket_of_systemd_is_refused(bundle_dir, is_datagram):
    port = free_port()
    other = "--datagram" if is_datagram else f"--listen=127.0.0.1:{free_port()}"
    activate = ["systemd-socket-activate", f"--listen=127.0.0.1:{port}", other]
    serve = [sys.executable, "-m", "prejit.runtime", "serve", str(bundle_dir)]
    with subprocess.Popen([*activate, *serve], stderr=subprocess.PIPE, text=True) as process:
        printed = process.stderr.readline()
        kind = socket.SOCK_DGRAM if is_datagram else socket.SOCK_STREAM
        with socket.socket(socket.AF_INET, kind) as client:
            client.connect(("127.0.0.1", port))
            client.send(b"x")
            printed += process.stderr.read()
    assert process.returncode == 6, printed
    assert ("does not listen at a TCP port" if is_datagram else "expected 1 socket") in printed
    assert "hint: give the .socket unit one ListenStream=" in printed


CI = ROOT / "deploy" / "ci"
STEPS = {"first", "candidate", "rollout", "back"}
SIZES = {"batch": (1, 3), "prompt": (64,), "context": (64, 512)}
"""As in `lettered_dir`, so that the build cache has the programs already."""
GATE_FAILED = 9

needs_tools = pytest.mark.skipif(
    not TOOLS.exists(), reason="no .venv-tools: `make .venv-tools/.ready` makes it"
)


@pytest.fixture
def clone(tmp_path):
    """A clean clone of this repository, with a manifest that builds in seconds."""
    place = tmp_path / "clone"
    ran("git", "clone", "-q", "--depth", "1", f"file://{ROOT}", place)
    shutil.copytree(CI, place / "deploy" / "ci", dirs_exist_ok=True)  # also if not committed
    write_lettered(place / "models" / "model")
    more = {"model": 'dtype = "float32"', "generate": "draft_tokens = 3"}
    write_manifest(place / "models" / "decoder.toml", "model", name="decoder", **SIZES, **more)
    return place


@pytest.fixture
def release(clone, registry, lettered_dir, build_cache, programs, tmp_path):
    """Runs a step of the script as a CI does."""
    key = tmp_path / "release.pem"
    ran("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key)
    given = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "MANIFEST": "models/decoder.toml",
        "CHANNEL": f"{registry.url}:prod",
        "SIGNING_KEY": str(key),
        "PREJIT_CACHE": str(build_cache),
    }

    def run(step, status=0):
        env = {**os.environ, **given}
        return ran("deploy/ci/release.sh", step, status=status, cwd=clone, env=env)

    return run


@pytest.mark.thorough
def test_a_pipeline_releases_gates_rolls_out_and_back(release, clone, registry, capsys):
    def tags():
        capsys.readouterr()
        assert main(["ls", registry.url, "--json"]) == 0
        return {each["tag"]: each["digest"] for each in json.loads(capsys.readouterr().out)}

    # Without a channel there is nothing to compare with, and the script does not guess.
    assert "prod: not found" in release("candidate", 6).stderr
    release("first")
    old = tags()["prod"]
    assert "serves this bundle already" in release("candidate").stdout
    nothing = f"{registry.url}:prod serves this bundle already: nothing to release\n"
    assert (clone / "gate.md").read_text() == nothing

    # The same model with a license passes; its signature travels with it.
    manifest = clone / "models" / "decoder.toml"
    (clone / "models" / "LICENSE").write_text("Public domain.\n")
    named = '"decoder"\nlicense = "LICENSE"'
    manifest.write_text(manifest.read_text().replace('"decoder"', named))
    release("candidate")
    assert tags()["prod"] == old
    assert "|" in (clone / "gate.md").read_text()
    release("rollout")
    new = tags()["prod"]
    assert new == tags()["candidate"] != old
    (clone / "trust.toml").write_text(
        '[keys.ci]\nfile = "release.pub.pem"\n[[rules]]\nnames = ["decoder"]\nkeys = ["ci"]\n'
    )
    public = ("openssl", "pkey", "-in", clone.parent / "release.pem", "-pubout", "-out")
    ran(*public, clone / "release.pub.pem")
    trusted = ["--trust", str(clone / "trust.toml")]
    assert main(["verify", f"{registry.url}:prod", *trusted]) == 0
    release("back")
    assert tags()["prod"] == old

    # Other weights give other tokens: the gate stops them before the channel moves.
    weights = clone / "models" / "model" / "model.safetensors"
    save_file({name: -value for name, value in load_file(weights).items()}, weights)
    release("candidate", GATE_FAILED)
    assert tags()["prod"] == old


def test_the_script_names_what_is_missing():
    def run(*arguments, **env):
        given = {"PATH": os.environ["PATH"], **env}
        done = ran("deploy/ci/release.sh", *arguments, status=None, cwd=ROOT, env=given)
        assert done.returncode != 0
        return done.stderr

    assert "MANIFEST: expected the path of a manifest" in run("candidate")
    assert "CHANNEL: expected oci://" in run("candidate", MANIFEST="a.toml")
    untagged = run("candidate", MANIFEST="a.toml", CHANNEL="oci://registry.example:5000/a")
    assert "expected oci://HOST/REPOSITORY:TAG, found 'oci://registry.example:5000/a'" in untagged
    wrong = run("deploy", MANIFEST="a.toml", CHANNEL="oci://registry.example/a:prod")
    assert "expected first, candidate, rollout or back, found 'deploy'" in wrong


@pytest.mark.thorough
@needs_tools
def test_the_published_schemas_and_shellcheck_accept_the_files(tmp_path):
    check = TOOLS / "check-jsonschema"
    ran(check, "--builtin-schema", "vendor.github-workflows", CI / "github.yml")
    schema = ("--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci")
    ran(check, *schema, CI / "gitlab.yml")
    # The commands in the files, which the schemas take for texts.
    github = yaml.safe_load((CI / "github.yml").read_text())["jobs"]["release"]["steps"]
    gitlab = yaml.safe_load((CI / "gitlab.yml").read_text())
    (jenkins,) = re.findall(r"sh '''(.*?)'''", (CI / "Jenkinsfile").read_text(), re.DOTALL)
    keys = ("before_script", "script", "after_script")
    commands = {
        "github": [each["run"] for each in github if "run" in each],
        "gitlab": [line for job in gitlab.values() for key in keys for line in job.get(key, ())],
        "jenkins": [jenkins],
    }
    for name, lines in commands.items():
        script = tmp_path / f"{name}.sh"
        script.write_text("\n".join(["#!/bin/sh", *lines]))
        ran(TOOLS / "shellcheck", script)
        steps = set(re.findall(r"release\.sh (\w+)", script.read_text()))
        assert steps <= STEPS
    ran(TOOLS / "shellcheck", CI / "release.sh")
    asked = yaml.safe_load((CI / "github.yml").read_text())[True]["workflow_dispatch"]["inputs"]
    assert set(asked["step"]["options"]) <= STEPS
    (choices,) = re.findall(r"choices: \[(.*?)\]", (CI / "Jenkinsfile").read_text())
    assert {each.strip("'") for each in choices.split(", ")} <= STEPS


HPC = ROOT / "deploy" / "hpc"
SLURM = ("slurmctld", "slurmd", "sbatch", "scancel", "squeue")
SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
MinJobAge=300
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 RealMemory=4096 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SMALL = ("--cpus-per-task=1", "--mem=2G")
"""Options of a job that the node of the test can run."""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A cluster of one node, which is this machine."""
    missing = [each for each in SLURM if shutil.which(each) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(
            f"needs root and Debian's slurmctld, slurmd and slurm-client; missing: {missing}"
        )
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    settings = tmp_path / "slurm.conf"
    ports = {"controller": free_port(), "node": free_port()}
    settings.write_text(SLURM_CONF.format(host=socket.gethostname(), place=tmp_path, **ports))
    monkeypatch.setenv("SLURM_CONF", str(settings))
    running = []
    try:
        with (tmp_path / "log").open("wb") as log:
            for daemon in (["slurmctld", "-D"], ["slurmd", "-D"]):
                running.append(subprocess.Popen(daemon, stdout=log, stderr=log))
        wait_for(lambda: "idle" in by_command("sinfo", "--noheader", "--format=%t"))
        yield
    finally:
        for each in reversed(running):
            each.terminate()
            each.wait()


def by_command(*arguments):
    done = ran(*arguments, status=None)
    return done.stdout + done.stderr


def state_of(job):
    return by_command("squeue", "--noheader", "--states=all", f"--jobs={job}", "-o%T").strip()


@pytest.mark.thorough
def test_a_job_serves_until_a_signal_ends_it(slurm, bundle_dir, tmp_path, monkeypatch, programs):
    port = free_port()
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("BUNDLE", str(bundle_dir))
    monkeypatch.setenv("PORT", str(port))
    script = HPC / "serve.sbatch"
    assert "to start at" in by_command("sbatch", "--test-only", *SMALL, script)
    printed = tmp_path / "printed"
    job = by_command("sbatch", "--parsable", f"--output={printed}", *SMALL, script).strip()
    assert job.isdecimal(), job
    wait_for(lambda: printed.exists() and "ready in" in printed.read_text())
    assert printed.read_text().startswith(f"http://{socket.gethostname()}:{port}\n")
    found = httpx.post(f"http://127.0.0.1:{port}/v2/models/score/infer", json=INFER, timeout=60)
    assert found.status_code == 200
    assert state_of(job) == "RUNNING"
    by_command("scancel", "--signal=TERM", "--batch", job)  # as --signal=B:TERM@120 does it
    wait_for(lambda: state_of(job) not in ("RUNNING", "COMPLETING"))
    assert state_of(job) == "COMPLETED", printed.read_text()


@needs_tools
def test_shellcheck_accepts_the_script_and_the_recipe(tmp_path):
    sections = re.split(r"^%(\w+)\n", (HPC / "prejit.def").read_text(), flags=re.MULTILINE)
    recipe = dict(zip(sections[1::2], sections[2::2], strict=True))
    for name in ("post", "environment", "runscript"):
        (tmp_path / f"{name}.sh").write_text(f"#!/bin/sh\n{recipe[name]}")
    scripts = [HPC / "serve.sbatch", *tmp_path.glob("*.sh")]
    ran(TOOLS / "shellcheck", *scripts)
    # Its image is that of the Containerfile, which benchmarks/ship/container_start.py builds and runs.
    (install,) = re.findall(r"pip --python .*", recipe["post"])
    containerfile = (ROOT / "deploy" / "container" / "Containerfile").read_text()
    joined = re.sub(r"\s*\\\n\s*", " ", containerfile)
    assert install in joined
