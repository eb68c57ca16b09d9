"""One build for a whole fleet, on a machine without any accelerator; every machine picks its part."""

import dataclasses
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.decoders import gpt2_config
from tests.extent import ALL
from tests.layouts import contents_of
from tests.manifests import functions_manifest
from tests.parity.cases import Case
from tests.processes import ran

from prejit.compiler.targets import environments
from prejit.compiler.targets.installing import find_interpreter, make_environment
from prejit.compiler.targets.target_classes import Target
from prejit.compiler.targets.target_table import target
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import BuildError
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import (
    EXECUTABLES_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.opening import match
from prejit.runtime.format.root import read_root
from prejit.runtime.machine.compare import compare
from prejit.runtime.machine.fingerprint import Fingerprint

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
OLD, NEW = "0.10.2", "0.12.0.1"
LEVELS = ("cpu-x86-64-v2", "cpu-x86-64-v3", "cpu-x86-64-v4") if ALL else ("cpu-x86-64-v3",)
ACCELERATORS = ("cuda-l4", "cuda-h100", "tpu-v5e", "tpu-v6e") if ALL else ("cuda-h100",)
"""The mesh of test_a_mesh_is_compiled_for_devices_that_are_not_here is of TPUs in a sample."""
# Of targets that are equally good the first is taken, and cpu-host may be no better than its level.
PINNED = [("cpu-host", OLD), *((name, NEW) for name in (*LEVELS, "cpu-host"))]
PINNED += [(name, NEW) for name in ACCELERATORS]
PROGRAMS = 3 * len(PINNED)
PROMPT = (
    *("--prompt-ids", "100,200,300", "--max-new-tokens", "24"),
    *("--on-mismatch", "error", "--json"),
)
MODEL = gpt2_config(vocab_size=8192, n_positions=128, n_embd=128, n_head=4, n_layer=1)
"""One layer, because compilers for accelerators take a second for each, and many weights."""


def manifest(path, name, tables):
    """A manifest of a model without a tokenizer, which the environments of targets lack."""
    Case("fleet", MODEL, seed=1).write(path.parent / "model")
    path.write_text(
        f'[bundle]\nname = "{name}"\n[model]\nsource = "model"\n'
        "[generate]\nbatch = [1]\nprompt = [16]\ncontext = [128]\n" + tables
    )
    return path


@pytest.fixture(scope="session")
def environment(environment_cache):
    wanted = environments.spec_for(Target("cpu-host", "cpu", jax=NEW), version("jax"))
    if wanted is not None:
        try:
            find_interpreter(wanted.jax, wanted.target)
        except BuildError as error:
            pytest.skip(f"{error}; {error.hint}")
    # Without a C++ compiler: kernels for each level and jaxlib would take as long as all else.
    return {"PREJIT_ENVIRONMENTS": str(environment_cache), "PATH": "/nonexistent"}


@pytest.fixture(scope="session")
def fleet(run, environment, tmp_path_factory):
    """A bundle for nine classes of machines; for four in a sample."""
    directory = tmp_path_factory.mktemp("fleet")
    tables = "".join(f'[[target]]\nname = "{name}"\njax = "{jax}"\n' for name, jax in PINNED)
    file = manifest(directory / "fleet.toml", "fleet", tables)
    command = ("build", file, "-o", directory / "out", "--no-measure", "--json")
    [built] = json.loads(run(*command, **environment).stdout)
    assert built["compiled"] + built["cached"] == PROGRAMS
    return directory / "out" / "fleet"


def python_with(jax, environment_cache):
    """An interpreter that has that version of jax and nothing of the build side's packages."""
    if version("jax") == jax:
        return [sys.executable]
    wanted = environments.spec_for(Target("cpu-host", "cpu", jax=jax), version("jax"))
    return [str(make_environment(wanted).python)]


GENERATE = """
import json, sys
from prejit.runtime import Fingerprint, load
path, *fingerprint = sys.argv[1:]
machine = Fingerprint.read(fingerprint[0]) if fingerprint else None
bundle = load(path, on_mismatch="error", fingerprint=machine)
token_ids = bundle.generate([100, 200, 300], max_new_tokens=24).token_ids
sources = [each.source for each in bundle.report()]
print(json.dumps({"target": bundle.target, "token_ids": token_ids, "sources": sources}))
"""


def generate(python, path, *fingerprint):
    """Generates in a fresh process of another environment, which lacks what the command line needs."""
    sources = os.pathsep.join(str(ROOT / side) for side in ("compiler", "runtime", "server"))
    environment = {**os.environ, "PYTHONPATH": sources}
    done = ran(*python, "-c", GENERATE, path, *fingerprint, env=environment)
    assert done.stderr == ""
    said = json.loads(done.stdout)
    assert set(said["sources"]) == {"loaded", "unused"}
    return said


def test_a_bundle_for_nine_classes_of_machines_holds_the_weights_once(fleet):
    contents = contents_of(fleet)
    assert set(contents) == {f"{name}-jax{jax}" for name, jax in PINNED}
    for media_type in (WEIGHTS_MEDIA_TYPE, PORTABLE_MEDIA_TYPE):
        assert len({c.manifest.layer(media_type).digest for c in contents.values()}) == 1
    packs = {c.manifest.layer(EXECUTABLES_MEDIA_TYPE).digest for c in contents.values()}
    assert len(packs) == len(PINNED)
    stored = sum(file.stat().st_size for file in fleet.rglob("*") if file.is_file())
    [weights] = {c.manifest.layer(WEIGHTS_MEDIA_TYPE).size for c in contents.values()}
    assert stored < 2 * weights


def test_what_cannot_run_here_is_verified_and_explained_here(fleet, run):
    assert json.loads(run("verify", fleet, "--json").stdout)["programs"] == PROGRAMS
    said = json.loads(run("explain", fleet, "--json").stdout)
    # A level whose features are all that this machine has is as close as the machine itself.
    here = {f"cpu-{name}-jax{version('jax')}" for name in ("host", "x86-64-v3", "x86-64-v4")}
    assert said["target"] in here
    verdicts = {verdict["target"]: verdict for verdict in said["verdicts"]}
    [platform] = [a for a in verdicts[f"cuda-h100-jax{NEW}"]["axes"] if a["name"] == "platform"]
    assert (platform["needed"], platform["found"]) == ("cuda", "cpu")


def test_each_machine_of_the_fleet_picks_its_part(fleet):
    here = dataclasses.replace(Fingerprint.current(), jaxlib=NEW)
    cuda = {"platform": "cuda", "plugin": f"jax-cuda13-pjrt {NEW}", "cuda": "13.0"}
    cuda |= {"driver": "580.95.05", "device_count": 1}
    tpu = {"platform": "tpu", "device_count": 1, "topology": "1x1"}
    if "tpu-v5e" in ACCELERATORS:
        tpu |= {"plugin": contents_of(fleet)[f"tpu-v5e-jax{NEW}"].config.requirement.plugin}
    machines = {
        "cuda-l4": (cuda | {"compute_capability": "8.9"}, "NVIDIA L4", 24),
        "cuda-h100": (cuda | {"compute_capability": "9.0"}, "NVIDIA H100 PCIe", 80),
        "tpu-v5e": (tpu, "TPU v5 lite", 16),
        "tpu-v6e": (tpu, "TPU v6 lite", 32),
    }
    with Layout(fleet) as layout:
        root = read_root(layout)
        for name in ACCELERATORS:
            said, kind, gib = machines[name]
            said |= {"device_kind": kind, "device_memory_bytes": gib << 30}
            found = match(root, dataclasses.replace(here, **said))
            assert [t.name for t in found if t.verdict.matches] == [f"{name}-jax{NEW}"]
        for level in LEVELS:
            features = target(level).cpu_features
            machine = dataclasses.replace(here, cpu_features=features)
            chosen = next(t for t in match(root, machine) if t.verdict.matches)
            contents = contents_of(fleet)
            used = contents[chosen.name].config.requirement.cpu_features
            assert set(used) <= set(features)
            needs = contents[f"{level}-jax{NEW}"].config.requirement
            assert set(needs.cpu_features) <= set(features), "an executable needs no more"
            assert compare(level, needs, machine).matches


def test_each_version_of_jax_and_every_level_gives_the_tokens(fleet, environment_cache, tmp_path):
    python = python_with(NEW, environment_cache)
    said = {jax: generate(python_with(jax, environment_cache), fleet) for jax in (OLD, NEW)}
    # A target that uses the same extensions as cpu-host is as good: either may be chosen.
    assert said[OLD]["target"] == f"cpu-host-jax{OLD}"
    assert said[NEW]["target"].endswith(f"-jax{NEW}")
    tokens = {tuple(each["token_ids"]) for each in said.values()}
    for level in LEVELS:
        if said[NEW]["target"] == f"{level}-jax{NEW}":
            continue
        features = target(level).cpu_features
        here = dataclasses.replace(Fingerprint.current(), jaxlib=NEW, cpu_features=features)
        if not set(features) <= set(Fingerprint.current().cpu_features):
            continue  # this machine is below that level
        file = tmp_path / f"{level}.json"
        file.write_bytes(to_json(here))
        found = generate(python, fleet, file)
        assert found["target"] == f"{level}-jax{NEW}"
        tokens.add(tuple(found["token_ids"]))
    assert len(tokens) == 1


def test_a_program_that_cannot_fit_its_device_is_no_bundle(run, environment, tmp_path):
    """Found out on the device it would be the first request that dies of RESOURCE_EXHAUSTED."""
    tables = f'[[target]]\nname = "cuda-l4"\njax = "{NEW}"\nmemory_bytes = 5_000_000\n'
    file = halves(tmp_path / "small.toml", "[1024, 1048576]", tables)
    said = run("build", file, "-o", tmp_path / "out", status=1, **environment).stderr
    assert f"target cuda-l4-jax{NEW}: a device has 0.01 GB, and 1 of 2 programs need more" in said
    assert "half/n1048576: needs 0.01 GB: arguments 0.00 GB" in said
    assert "hint: make [generate] batch or context smaller, split the model over a [mesh]" in said
    assert not (tmp_path / "out" / "small").exists()


def halves(path, sizes, tables):
    (path.parent / "halves.py").write_text("def half(x):\n    return x / 2\n")
    keys = (
        f'function = "halves:half"; args = {{ x = "float32[{{n}}]" }}; buckets = {{ n = {sizes} }}'
    )
    return functions_manifest(path, {"half": keys}, (), tables)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param("tpu-v5e-2x2", (1, 4), id="tpu-v5e 2x2"),
        pytest.param("cuda-h100", (2, 4), id="8 H100", marks=pytest.mark.thorough),
    ],
)
def test_a_mesh_is_compiled_for_devices_that_are_not_here(run, environment, tmp_path, name, mesh):
    data, tensor = mesh
    tables = (
        f"[mesh]\ndata = {data}\ntensor = {tensor}\n"
        f'[[target]]\nname = "{name}"\njax = "{NEW}"\n[[target]]\nname = "cpu-host"\n'
    )
    file = manifest(tmp_path / "mesh.toml", "mesh", tables)
    file.write_text(file.read_text().replace("batch = [1]", "batch = [2]"))
    run("build", file, "-o", tmp_path, **environment)
    assert json.loads(run("verify", tmp_path / "mesh", "--json").stdout)["programs"] == 6
    contents = contents_of(tmp_path / "mesh")
    needs = contents[f"{name}-jax{NEW}"].config.requirement
    assert needs.device_count == data * tensor
    weights = contents["cpu-host"].manifest.layer(WEIGHTS_MEDIA_TYPE).size
    for program in contents[f"{name}-jax{NEW}"].config.programs:
        assert program.memory.argument_bytes < 0.8 * weights, "each device holds a part of them"
    said = json.loads(run("generate", tmp_path / "mesh", *PROMPT).stdout)
    assert {p["source"] for p in said["programs"]} == {"loaded", "unused"}
