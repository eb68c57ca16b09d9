"""Servers of others with a bundle inside, as processes: Triton, BentoML, MLServer."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from .ports import free_port
from .waiting import wait_for


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
    root = Path(__file__).parents[1]
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
