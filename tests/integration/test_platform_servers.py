"""Programs of a bundle inside Triton, BentoML and MLServer answer what `Bundle.call` returns.

With PREJIT_PLATFORM_FIGURES the figures of the calls are written to tests/campaigns.
"""

import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from tests.campaigns.campaign import facts, machine_facts, write_figures
from tests.ports import free_port
from tests.waiting import wait_for

from prejit.compiler import Program, build
from prejit.runtime import load

pytestmark = pytest.mark.thorough  # `make test-platforms`
CALLS = int(os.environ.get("PREJIT_PLATFORM_CALLS", "5"))
"""Calls of a program that takes some time, in turn with `Bundle.call`."""
X = np.random.default_rng(3).standard_normal((64, 1024), np.float32)
KINDS = {
    "b": np.array([True, False, True]),
    "i": np.arange(4, dtype=np.int8).reshape(2, 2),
    "h": np.arange(4, dtype=np.float16),
}
DATATYPES = {"bool": "BOOL", "int8": "INT8", "float16": "FP16", "float32": "FP32"}


@dataclass(frozen=True)
class PlatformServer:
    """How to start a server."""

    package: str  # that has it
    # Writes its files for bundles, by the name of their only program, into a directory, and returns the
    # command for a port of HTTP and one of gRPC.
    command: Callable[[Mapping[str, Path], Path, int, int], list[str]]
    environ: Callable[[Path], dict[str, str]] = field(default=lambda directory: {})
    protocol: str = "http"  # the module of tritonclient that sends it tensors as bytes

    @property
    def is_here(self):
        return importlib.util.find_spec(self.package) is not None

    @contextmanager
    def running(self, bundles, directory):
        """Run it until the block ends; yields `host:port`, where all models are ready."""
        port, grpc_port = free_port(), free_port()
        command = self.command(bundles, directory, port, grpc_port)
        environ = {**os.environ, **self.environ(directory)}
        log = directory / "log"
        with open(log, "wb") as output:
            options = {"cwd": directory, "env": environ, "stdout": output, "stderr": output}
            process = subprocess.Popen(command, start_new_session=True, **options)
        try:
            for name in bundles:
                url = f"http://127.0.0.1:{port}/v2/models/{name}/ready"
                wait_for(
                    lambda url=url: process.poll() is not None or _is_ok(url),
                    300,
                    f"not ready: {log.read_text(errors='replace')[-3000:]}",
                )
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            yield f"127.0.0.1:{grpc_port if self.protocol == 'grpc' else port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _is_ok(url):
    try:
        return httpx.get(url, timeout=10).is_success
    except httpx.HTTPError:
        return False


def _triton():
    spec = importlib.util.find_spec("pytriton")
    return Path(spec.origin).parent / "tritonserver"


def _triton_command(bundles, directory, port, grpc_port):
    """Use the files of nvidia-pytriton: it has Triton, and a stub for each version of Python."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(_triton() / "backends" / "python", directory / "backends" / "python")
    stub = _triton() / "python_backend_stubs" / version / "triton_python_backend_stub"
    shutil.copy(stub, directory / "backends" / "python")
    for name, bundle in bundles.items():
        model = directory / "models" / name
        (model / "1").mkdir(parents=True)
        (model / "1" / "model.py").write_text(
            "from prejit.server.adapters.triton_model import TritonPythonModel\n"
        )
        (model / "config.pbtxt").write_text(
            'backend: "python"\n'
            f'parameters {{ key: "bundle" value {{ string_value: "{bundle}" }} }}\n'
            "instance_group [{ kind: KIND_CPU }]\n"
        )
    return [
        str(_triton() / "bin" / "tritonserver"),
        *("--model-repository", str(directory / "models")),
        *("--backend-directory", str(directory / "backends")),
        *("--http-port", str(port), "--http-address", "127.0.0.1"),
        *("--allow-grpc", "false", "--allow-metrics", "false"),
    ]


def _triton_environ(directory):
    """Its process embeds Python: that needs the library of Python, and the packages of this environment."""
    libraries = [
        sysconfig.get_config_var("LIBDIR"),
        str(_triton().parents[1] / "nvidia_pytriton.libs"),
    ]
    site = sysconfig.get_path("purelib")
    root = Path(__file__).parents[2]
    houses = [str(root / house) for house in ("runtime", "server")]  # no .pth file is read there
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONPATH": os.pathsep.join([site, *houses]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }


def _bento_command(bundles, directory, port, grpc_port):
    [bundle] = bundles.values()
    (directory / "service.py").write_text(
        "from prejit.server.adapters.bentoml_service import make_bento_service\n\n"
        f'bundle = make_bento_service("{bundle}")\n'
    )
    command = [sys.executable, "-m", "bentoml", "serve", "service:bundle"]
    return [*command, "--host", "127.0.0.1", "--port", str(port)]


def _mlserver_command(bundles, directory, port, grpc_port):
    for name, bundle in bundles.items():
        (directory / "models" / name).mkdir(parents=True)
        described = {
            "name": name,
            "implementation": "prejit.server.adapters.mlserver_model.PrejitModel",
            "parameters": {"uri": str(bundle)},
        }
        (directory / "models" / name / "model-settings.json").write_text(json.dumps(described))
    ports = {"http_port": port, "grpc_port": grpc_port, "metrics_port": free_port()}
    settings = {"host": "127.0.0.1", "debug": False, **ports}
    (directory / "models" / "settings.json").write_text(json.dumps(settings))
    return [str(Path(sys.executable).with_name("mlserver")), "start", str(directory / "models")]


PLATFORM_SERVERS = {
    "Triton": PlatformServer("pytriton", _triton_command, _triton_environ),
    "BentoML": PlatformServer(
        "bentoml",
        _bento_command,
        lambda at: {"BENTOML_HOME": str(at / "home"), "BENTOML_DO_NOT_TRACK": "1"},
    ),
    "MLServer": PlatformServer("mlserver", _mlserver_command, protocol="grpc"),
}


def rank(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return {"scores": x[:, :8]}


def kinds(b, i, h, times=1):
    return {"b": ~b, "i": i * times, "h": h + 1}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory, build_cache):
    random = np.random.default_rng(4)
    weights = [random.standard_normal((1024, 1024), np.float32) / np.float32(32) for _ in range(24)]
    args = {"b": "bool[3]", "i": "int8[2, 2]", "h": "float16[4]"}
    programs = (
        Program("rank", rank, ["float32[64, 1024]"], params=weights),
        Program("kinds", kinds, args, static={"times": [1, 3]}),
    )
    output = tmp_path_factory.mktemp("platforms")
    return {
        program.name: build(
            program, output, name=f"of-{program.name}", cache=build_cache, quiet=True
        ).path
        for program in programs
    }


def infer(client, connection, model, given, **parameters):
    inputs = []
    for name, array in given.items():
        inputs.append(client.InferInput(name, list(array.shape), DATATYPES[array.dtype.name]))
        inputs[-1].set_data_from_numpy(array)
    return connection.infer(model, inputs, parameters=parameters or None)


@pytest.mark.parametrize("name", PLATFORM_SERVERS)
def test_a_server_of_others_answers_as_the_bundle_does(name, bundles, tmp_path):
    server = PLATFORM_SERVERS[name]
    if not server.is_here:
        pytest.skip(f"{server.package} is not installed: `make test-platforms` does it")
    some = {"rank": bundles["rank"]} if name == "BentoML" else bundles  # a service has one bundle
    before = machine_facts()
    with server.running(some, tmp_path) as address, load(bundles["rank"]) as bundle:
        client = importlib.import_module(f"tritonclient.{server.protocol}")
        connection = client.InferenceServerClient(address)
        as_json = {"as_json": True} if server.protocol == "grpc" else {}
        described = connection.get_model_metadata("rank", **as_json)
        [takes], [gives] = described["inputs"], described["outputs"]
        assert [int(size) for size in takes["shape"]] == [64, 1024]
        assert (gives["name"], gives["datatype"]) == ("scores", "FP32")
        expected = bundle.call("rank", X)["scores"]
        seconds = {"call": [], "server": []}
        for _ in range(CALLS):
            started = time.perf_counter()
            bundle.call("rank", X)
            seconds["call"].append(time.perf_counter() - started)
            started = time.perf_counter()
            found = infer(client, connection, "rank", {takes["name"]: X})
            seconds["server"].append(time.perf_counter() - started)
            np.testing.assert_array_equal(found.as_numpy("scores"), expected)
        with pytest.raises(Exception, match=r"static arguments of 'rank' \(none\), found 'speed'"):
            infer(client, connection, "rank", {takes["name"]: X}, speed=3)
        if "kinds" in some:
            found = infer(client, connection, "kinds", KINDS, times=3)
            for each, wanted in kinds(**KINDS, times=3).items():
                np.testing.assert_array_equal(found.as_numpy(each), wanted, strict=True)
    if os.environ.get("PREJIT_PLATFORM_FIGURES"):
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        write_figures(
            f"{name.lower()}_calls",
            {
                **facts(server.package.replace("py", "nvidia-py", 1), "jax", "numpy"),
                **before,
                "calls": CALLS,
                "milliseconds of Bundle.call, median": round(medians["call"] * 1e3, 2),
                "milliseconds by the server, median": round(medians["server"] * 1e3, 2),
                "ratio": round(medians["server"] / medians["call"], 3),
            },
        )
