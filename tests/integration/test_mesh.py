"""Decoders on several devices: the tokens of one device, however weights and cache are split."""

import json
import os
import subprocess
import sys

import pytest
from tests.decoders import gpt2_config
from tests.extent import cases
from tests.manifests import write_manifest
from tests.parity.cases import Case
from tests.ports import free_port
from tests.quick_compiling import XLA_FLAGS

from prejit.compiler.manifest.reading import read_manifest
from prejit.runtime.errors import ManifestError

LLAMA = {
    **{"model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96},
    **{"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4},
    **{"max_position_embeddings": 64, "attention_bias": True, "tie_word_embeddings": False},
}
# Nothing divides 97: the table is on every device.
GPT2 = gpt2_config(vocab_size=97, n_positions=64, n_embd=64, n_head=8, n_layer=1)
MESHES = {
    "llama": cases([(2, 1)], others=[(1, 2), (2, 2), (4, 2)]),
    "gpt2": cases([], others=[(1, 8), (1, 2)]),
    "int8": cases([], others=[(2, 2)]),  # the llama with a cache of int8
}
PROMPTS = [[5, 6, 7], [9], list(range(1, 18)), [33] * 8]  # of chunks of 4: 1, 1, 5 and 2
NEW_TOKENS = 12

GENERATE = """
import dataclasses, json, sys, warnings
from prejit.runtime import FallbackWarning, Fingerprint, UsageError, load
from prejit.server import Engine
prompts, count = json.loads(sys.argv[1]), int(sys.argv[2])
here = Fingerprint.current()
if {mismatch}:
    warnings.simplefilter("ignore", FallbackWarning)
    here = dataclasses.replace(here, jaxlib="0.4.0")
out = {{}}
for path in sys.argv[3:]:
    bundle = load(path, on_mismatch="jit" if {mismatch} else "error", fingerprint=here)
    results = bundle.generate_batch(prompts, max_new_tokens=count, stop_token_ids=[])
    copied = bundle.generate(
        prompts[0], max_new_tokens=count, stop_token_ids=[], prefix=bundle.prefix(prompts[0])
    )
    assert copied.token_ids == results[0].token_ids and copied.stats.reused_tokens
    device = bundle.decoder.device
    try:
        engine = Engine(bundle)
    except UsageError as error:
        assert "mesh of one process" in str(error)
        engine = None
    assert (engine is None) == (device.in_cluster and device.mesh is not None)
    if engine is not None:
        asked = [engine.submit(p, max_new_tokens=count, stop_token_ids=[]) for p in prompts]
        assert [a.result().token_ids for a in asked] == [one.token_ids for one in results]
        engine.close()
    sources = sorted({{report.source for report in bundle.report()}})
    out[bundle.name] = [[list(result.token_ids) for result in results], sources]
print(json.dumps(out))
"""
IN_CLUSTER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
process, count, coordinator = int(sys.argv.pop(1)), int(sys.argv.pop(1)), sys.argv.pop(1)
jax.distributed.initialize(coordinator, count, process)
from prejit.runtime.generation import decode
decode.CALL_SECONDS = (1e-9, 1e9)[process]  # one is fast, one slow: both must make the same calls
"""


def split_manifest(path, source, mesh, *, batch=(4,), context=(32,)):
    """Write a manifest of a decoder over a mesh, or over one device."""
    int8 = 'cache_dtype = "int8"' if path.name.startswith("int8-") else ""
    sizes = {"batch": batch, "prompt": [4], "context": context}
    write_manifest(path, source, name=path.stem, **sizes, generate=int8)
    if mesh is not None:
        text = f"[mesh]\ndata = {mesh[0]}\ntensor = {mesh[1]}\n"
        path.write_text(path.read_text() + text)
    return path


@pytest.fixture(scope="module")
def bundles(run, tmp_path_factory):
    """By `llama-1x2`; `llama-one` is of one device."""
    directory = tmp_path_factory.mktemp("mesh")
    manifests = []
    for family, meshes in MESHES.items():
        Case(family, GPT2 if family == "gpt2" else LLAMA, seed=7).write(directory / family)
        for mesh in (None, *meshes) if meshes else ():
            path = directory / f"{family}-{'x'.join(map(str, mesh or ['one']))}.toml"
            manifests.append(split_manifest(path, directory / family, mesh))
    run("build", *manifests, "-o", directory, quick=True)
    return {each.stem: directory / each.stem for each in manifests}


@pytest.fixture(scope="module")
def generated(python, bundles):
    """What all of them generate in one fresh process, which may compile nothing."""
    arguments = (GENERATE.format(mismatch=False), json.dumps(PROMPTS), str(NEW_TOKENS))
    done = python(*arguments, *bundles.values(), JAX_PLATFORMS="cpu")
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("family", "mesh"), [(family, mesh) for family, meshes in MESHES.items() for mesh in meshes]
)
def test_every_mesh_gives_the_tokens_of_one_device(generated, family, mesh):
    expected, _ = generated[f"{family}-one"]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    tokens, sources = generated[f"{family}-{mesh[0]}x{mesh[1]}"]
    assert tokens == expected
    assert sources == ["loaded"]


@pytest.mark.thorough
def test_a_mesh_falls_back_to_compiling_and_keeps_programs(python, bundles, generated, tmp_path):
    arguments = (GENERATE.format(mismatch=True), json.dumps(PROMPTS), str(NEW_TOKENS))
    for source in ("compiled", "kept"):
        settings = {"PREJIT_RUNTIME_CACHE": str(tmp_path), "XLA_FLAGS": XLA_FLAGS}
        done = python(*arguments, bundles["int8-2x2"], **settings)
        result = json.loads(done.stdout.splitlines()[-1])["int8-2x2"]
        assert result == [generated["int8-one"][0], [source]]


def test_sampled_tokens_are_those_of_one_device(bundles):
    from prejit.runtime import Sampling, load

    sampling = [Sampling(temperature=0.9, top_k=20, top_p=0.9, seed=seed) for seed in range(4)]
    options = {"max_new_tokens": 6, "sampling": sampling, "stop_token_ids": []}
    names = ("llama-one", "llama-2x1")
    one, mesh = (load(bundles[name]).generate_batch(PROMPTS, **options) for name in names)
    assert [result.token_ids for result in mesh] == [result.token_ids for result in one]


MEASURE = """
import sys
import numpy as np
from prejit.runtime import load
from prejit.runtime.device.device import Device
def anonymous():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous"))
Device().put(np.zeros(1))  # imports what arrays are made of
bundle = load(sys.argv[1])
bundle.prepare()
before = anonymous()
bundle.generate([1, 2, 3], max_new_tokens=2, stop_token_ids=[])
print(anonymous() - before)
"""


@pytest.mark.thorough
def test_shards_are_slices_of_the_map_and_columns_are_copied_once(run, python, tmp_path):
    config = LLAMA | {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 1}
    config |= {"num_key_value_heads": 4, "num_attention_heads": 4, "head_dim": 8}
    source = tmp_path / "source"
    Case("large", config, seed=7).write(source)
    manifest = split_manifest(tmp_path / "large.toml", source, (1, 4), batch=[1], context=[16])
    run("build", manifest, "-o", tmp_path, quick=True)
    matrix = 4 * 1024 * 8192
    assert (source / "model.safetensors").stat().st_size > 3 * matrix
    grown = int(python(MEASURE, tmp_path / "large").stdout.splitlines()[-1])
    # Gate and up are split by rows and stay in the map. Down is split by columns: each device copies
    # its own.
    assert grown < 1.25 * matrix


def test_a_batch_that_a_mesh_does_not_divide_is_told_with_both_numbers(tmp_path):
    manifest = split_manifest(tmp_path / "bad.toml", tmp_path, (2, 1), batch=[1, 4])
    told = r"(?s)bad\.toml.*generate\.batch\[0\].*multiple of 2, which mesh\.data is; found 1"
    with pytest.raises(ManifestError, match=told):
        read_manifest(manifest)


@pytest.fixture
def in_cluster(tmp_path):
    """Runs a script in processes of one CPU device each; gives (exit status, stdout, stderr) of each."""
    env = {**os.environ, "PREJIT_RUNTIME_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}

    def run(processes, script, *arguments, flags=""):
        given = (str(processes), f"127.0.0.1:{free_port()}", *map(str, arguments))
        command = (sys.executable, "-c", IN_CLUSTER + script)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = [
            subprocess.Popen([*command, str(n), *given], env={**env, "XLA_FLAGS": flags}, **pipes)
            for n in range(processes)
        ]
        try:
            outputs = [process.communicate(timeout=300) for process in started]
        finally:
            for process in started:
                process.kill()
        return [(p.returncode, *output) for p, output in zip(started, outputs, strict=True)]

    return run


@pytest.mark.parametrize(
    ("name", "source"),
    cases([("llama-2x1", "loaded")], [("llama-1x2", "compiled"), ("llama-one", "loaded")]),
)
def test_two_processes_give_the_tokens_of_one_device(in_cluster, bundles, generated, name, source):
    expected, mismatch = generated["llama-one"][0], source == "compiled"
    script = GENERATE.format(mismatch=mismatch)
    flags = XLA_FLAGS if mismatch else ""
    arguments = (json.dumps(PROMPTS), NEW_TOKENS, bundles[name])
    for status, out, err in in_cluster(2, script, *arguments, flags=flags):
        assert status == 0, err
        assert json.loads(out.splitlines()[-1])[name] == [expected, [source]]


def test_a_cluster_with_too_few_devices_is_told_so(in_cluster, bundles):
    """What a machine with too few accelerators is told as well: there, too, the client is jax's."""
    arguments = (json.dumps(PROMPTS), NEW_TOKENS, bundles["llama-2x1"])
    [(status, _, err)] = in_cluster(1, GENERATE.format(mismatch=False), *arguments)
    assert status != 0
    assert "UsageError: expected 2 cpu devices for the bundle's mesh, found 1" in err
