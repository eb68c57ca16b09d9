"""A build merges adapters: their bytes are in its keys and its provenance, and change no program."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.decoders import write_random
from tests.manifests import write_manifest
from tests.parity.adapter_cases import write_adapter

import prejit.compiler
from prejit.compiler.progress import Quiet
from prejit.compiler.rebuilding.build_record import read_recorded
from prejit.compiler.rebuilding.rebuilt import rebuild
from prejit.runtime.errors import BuildError, ManifestError

pytestmark = pytest.mark.thorough

MODULE = "base_model.model.transformer.h.0.attn.c_attn"
SHAPES = {f"{MODULE}.lora_A.weight": (2, 24), f"{MODULE}.lora_B.weight": (72, 2)}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["c_attn"]}


def test_other_adapters_are_other_weights_in_the_same_programs(build_cache, tmp_path):
    write_random("gpt2", tmp_path / "gpt2")
    adapted = 'adapters = ["sql"]\ndtype = "int8"'
    sizes = {"prompt": (8,), "context": (24,)}
    manifest = write_manifest(tmp_path / "m.toml", "gpt2", model=adapted, **sizes)
    options = {"cache": build_cache, "measure": False, "quiet": True}
    with pytest.raises(ManifestError, match=r"model\.adapters\[0\]: expected a directory"):
        prejit.compiler.plan(manifest, cache=build_cache)
    write_adapter(tmp_path / "sql", CONFIG, SHAPES, 1)
    first = prejit.compiler.build(manifest, tmp_path / "first", **options)
    recorded = read_recorded(first.path)
    sources = {(each.base, each.name) for each in recorded.sources}
    assert {
        *(("manifest", "sql/adapter_config.json"), ("manifest", "sql/adapter_model.safetensors")),
        ("model", "model.safetensors"),
    } <= sources
    file = tmp_path / "sql" / "adapter_model.safetensors"
    save_file({name: value * np.float32(2) for name, value in load_file(file).items()}, file)
    with pytest.raises(BuildError, match=r"sql/adapter_model\.safetensors: expected sha256:"):
        rebuild(first.path, manifest, progress=Quiet(), workers=1)
    second = prejit.compiler.build(manifest, tmp_path / "second", **options)
    assert (second.digest != first.digest, second.compiled) == (True, 0)
