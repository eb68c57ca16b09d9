"""Real builds through the command line, in processes of their own, cached for the whole session."""

import functools
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.encoders import write_encoder
from tests.manifests import encoder_manifest, write_manifest
from tests.processes import ran
from tests.store_servers import docker_registry, running

from prejit.runtime import load

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("PREJIT_SHARED", ROOT.parent / "shared"))


@pytest.fixture(scope="session")
def run(build_cache, warm, tmp_path_factory):
    """Runs `prejit ARGUMENTS` in a new process, builds in one of warm.py; `quick` as there."""
    runtime_cache = tmp_path_factory.mktemp("caches") / "runtime"
    base = {"PREJIT_CACHE": str(build_cache), "PREJIT_RUNTIME_CACHE": str(runtime_cache)}

    def run(*arguments, status=0, quick=False, **env):
        if arguments[0] not in ("build", "plan"):
            environment = {**os.environ, **base, **env}
            command = (sys.executable, "-m", "prejit.runtime", *arguments)
            return ran(*command, status=status, env=environment)
        done = warm.prejit(*arguments, env={**base, **env}, quick=quick)
        assert done.returncode == status, f"{done.args}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def python(run, tmp_path_factory):
    """Runs a script in a fresh process; what it prints as its last line is JSON."""
    runtime_cache = tmp_path_factory.mktemp("python") / "runtime"

    def python(script, *arguments, **env):
        environment = {**os.environ, "PREJIT_RUNTIME_CACHE": str(runtime_cache), **env}
        return ran(sys.executable, "-c", script, *arguments, env=environment)

    return python


@pytest.fixture(scope="module")
def here(request, tmp_path_factory):
    """A directory with the PROGRAM of a module as serve.py."""
    directory = tmp_path_factory.mktemp("program")
    (directory / "serve.py").write_text(request.module.PROGRAM)
    return directory


@pytest.fixture(scope="module")
def python_at(here, tmp_path_factory):
    """Runs Python in the directory `here` of a module, with the module's own caches or others."""
    caches = tmp_path_factory.mktemp("caches")
    own = {"PREJIT_RUNTIME_CACHE": str(caches / "runtime"), "PREJIT_CACHE": str(caches / "build")}

    def run(*words, status=0, **env):
        environment = {**os.environ, **own, **env}
        environment.pop("PYTEST_CURRENT_TEST", None)  # another in each test: an input of recordings
        return ran(sys.executable, *words, status=status, env=environment, cwd=here)

    return run


@pytest.fixture(scope="module")
def prejit_at(python_at):
    """Runs `prejit ARGUMENTS` as `python_at` does."""
    return functools.partial(python_at, "-m", "prejit.runtime")


@pytest.fixture(scope="module")
def reported(here, prejit_at):
    """Runs a command with a recorded bundle, and returns what it printed, and the report of its run."""

    def run(bundle, *command, options=(), **env):
        file = here / "report.json"
        done = prejit_at("run", bundle, "-o", file, *options, "--", *command, **env)
        return done, json.loads(file.read_text())

    return run


@pytest.fixture(scope="session")
def of_letters(run, once):
    """Builds an encoder that a function writes: `of_letters("scorer", write_scorer, "shapes = [[1, 8]]")`."""

    def built(name, write, encode):
        def make(directory):
            (directory / "model").mkdir()
            write(directory / "model")
            manifest = encoder_manifest(directory / f"{name}.toml", encode)
            run("build", manifest, "-o", directory, quick=True)

        return once(f"letters-{name}", make) / name

    return built


@pytest.fixture(scope="session")
def stories():
    """A trained Llama checkpoint and the text that it is known to write."""
    directory = SHARED / "data" / "stories260k"
    if not directory.is_dir():
        pytest.skip(f"no checkpoint at {directory}; set PREJIT_SHARED to the directory that has it")
    return directory, json.loads((directory / "expected.json").read_text())


@pytest.fixture
def serve():
    """Starts `prejit serve ARGUMENTS` as a process, which ends with the test."""
    from .test_serve import Process

    begun = []

    def start(*arguments, **options):
        begun.append(Process(*arguments, **options))
        return begun[-1]

    yield start
    for each in begun:
        each.kill()


@pytest.fixture
def registry(tmp_path):
    """A real registry, as a `Server` of store_servers.py."""
    with running(docker_registry(tmp_path)) as server:
        yield server


@pytest.fixture
def programs(tmp_path):
    """A directory for PATH with the program `prejit`."""
    directory = tmp_path / "programs"
    directory.mkdir()
    program = directory / "prejit"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m prejit.runtime "$@"\n')
    program.chmod(0o755)
    return directory


CHAT_TEMPLATE = """\
{{ bos_token }}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}
{% if tools %}{{ tools[0].function.name }} <tool_call> {% endif %}{% for message in messages %}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}
{{ call.function.arguments.a }}{% endfor %}
{% endfor %}"""
"""A chat template that shows tools, calls and efforts."""


@pytest.fixture(scope="session")
def stories_dir(run, stories, once):
    """A bundle of stories260k with CHAT_TEMPLATE, for four texts at once."""

    def make(directory):
        source = directory / "model"
        shutil.copytree(stories[0], source)
        source.chmod(0o755)
        (source / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        sizes = {"batch": (4,), "prompt": (32,), "context": (320,)}
        manifest = write_manifest(directory / "m.toml", source, name="stories", **sizes)
        run("build", manifest, "-o", directory, quick=True)

    return once("stories", make) / "stories"


@pytest.fixture(scope="session")
def demo(run, once):
    """The demo, built for this machine alone and with its smallest sizes, as the tests of pages build it."""

    def make(directory):
        (directory / "demo-model").symlink_to(ROOT / "manifests" / "demo-model")
        text = (ROOT / "manifests" / "demo.toml").read_text()
        for sizes, smallest in (("[16, 64]", "[16]"), ("[128, 512]", "[128]")):
            assert sizes in text
            text = text.replace(sizes, smallest)
        (directory / "demo.toml").write_text(text)
        run("build", directory / "demo.toml", "--target", "cpu-host", "-o", directory, quick=True)

    return once("demo", make) / "demo"


@pytest.fixture(scope="session")
def encoder_dir(run, once):
    """A tiny sentence encoder whose words are letters."""

    def make(directory):
        write_encoder(directory / "model", pooling=("mean_tokens",), normalize=True)
        manifest = encoder_manifest(directory / "sentences.toml", "shapes = [[4, 16]]")
        run("build", manifest, "-o", directory, quick=True)

    return once("letters-encoder", make) / "sentences"


@pytest.fixture(scope="session")
def stories_bundle(stories_dir):
    return load(stories_dir)


@pytest.fixture(scope="session")
def lettered_bundle(lettered_dir):
    return load(lettered_dir, on_mismatch="error")


@pytest.fixture(scope="session")
def encoder_bundle(encoder_dir):
    return load(encoder_dir)


@pytest.fixture(scope="module")
def models(stories_bundle, encoder_bundle):
    """A decoder and an encoder, served as `stories` and `tiny`."""
    from prejit.server.engine.engine import Engine
    from prejit.server.served.served import Models, Served

    engine = Engine(stories_bundle, slots=4, queue=64)
    made = Models(
        Served("stories", stories_bundle, engine, 1_700_000_000),
        Served("tiny", encoder_bundle, Engine(encoder_bundle), 1_700_000_001),
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(models):
    """A server of these models. A module may have a server of its own of this name."""
    from tests.unit.server.running import running

    from prejit.server.gate.server_settings import Settings

    with running(models, Settings(max_tokens=250)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    """A client of the package openai, whose overloads want types of every literal."""
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def post(server):
    """Sends a body: `post("/v1/completions", {...})`, or bytes as they are."""
    import httpx

    with httpx.Client(base_url=server.url, timeout=60) as http:

        def send(path, body):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return http.post(path, content=content, headers={"Content-Type": "application/json"})

        yield send
