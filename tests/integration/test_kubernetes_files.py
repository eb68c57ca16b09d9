"""deploy/kubernetes and deploy/kserve: Helm installs the chart, schemas fit, and the containers run here."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.fake_kubernetes import fake_kubernetes
from tests.ports import free_port
from tests.processes import ran
from tests.waiting import wait_for

from prejit.runtime.__main__ import main

from .test_serve import infer

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "kubernetes" / "chart"
TOOLS = ROOT / ".venv-tools" / "bin" / "python"
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

needs_tools = pytest.mark.skipif(
    not TOOLS.exists() or sys.version_info < (3, 12),
    reason="needs .venv-tools of Python 3.12 or newer: `make .venv-tools/.ready` makes it",
)


def with_tools(code, *values):
    return ran(TOOLS, "-c", code, json.dumps(values)).stdout


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
@needs_tools
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
@needs_tools
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


def test_a_node_prints_the_fingerprint_that_fleet_reads(bundle_dir, programs, tmp_path, capsys):
    pod = one(plain(), "DaemonSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    with subprocess.Popen(container["command"], env=env, stdout=subprocess.PIPE) as printed:
        line = printed.stdout.readline()
        assert printed.poll() is None  # a DaemonSet starts again what ends
        printed.kill()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "node-1.json").write_bytes(line)
    assert main(["fleet", str(bundle_dir), str(tmp_path / "saved"), "--on-mismatch", "error"]) == 0
    assert "node-1" in capsys.readouterr().out


@pytest.mark.thorough
@needs_tools
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
