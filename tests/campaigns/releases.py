"""Releases of one small model: 22 that must not take the place of the base, and twenty that may."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tests.layouts import blob, index_of
from tests.lettered import write_lettered
from tests.manifests import write_manifest

LAYERS = 2  # layers that compute; all others add nothing
IDLE = 6
DEEP = {"n_embd": 256, "n_head": 8}
"""Idle layers and sizes of a base in which one layer is a tenth of the time."""
SLO = 'max_changed_tokens = "0%"\nmax_larger = "25%"\nmax_more_memory = "25%"\n'
DEFAULTS = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
TARGETS = ("cpu-host", "cpu-x86-64-v2")
FMA4 = """\
[[target]]
name = "cpu-fma4"
platform = "cpu"
architecture = "x86_64"
cpu = "x86-64-v2"
cpu_features = ["64bit", "cmov", "cx8", "fxsr", "sse", "sse2", "sse3", "ssse3", "sse4.1", "avx", "fma4"]
"""
"""A target with instructions that CPUs have had for three years only, until 2017."""


@dataclass(frozen=True)
class Release:
    """A release: its change to the base, and its checks. At least one of these must stop it."""

    name: str
    checks: tuple[str, ...] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict)  # options of `write_release`
    config: Mapping[str, Any] = field(default_factory=dict)  # fields of config.json
    idle: int = 0  # layers that add nothing. With some it is a release beside the deep base
    change: Callable[[Path], object] | None = None  # of the checkpoint
    after: Callable[[Path], object] | None = None  # of the bundle
    fresh: bool = False  # built with an empty cache
    signed: bool | None = None  # both run under a policy that wants signatures


SIZES = {"name": "m", "batch": (1, 2), "prompt": (64,), "context": (512,), "targets": TARGETS}


def write_release(path, model, *, draft_tokens=0, dtype="float32", slo=SLO, more="", **others):
    """Write the manifest of a release; `others` are options of `write_manifest`."""
    generate = f"draft_tokens = {draft_tokens}\n[slo]\n{slo}{more}"
    given = {**SIZES, "model": f'dtype = "{dtype}"', "generate": generate, **others}
    return write_manifest(path, model, **given)


def base_of(release):
    return DEEP_BASE if release.idle else BASE


def build_release(warm, at, cache, release):
    model = at / "model"
    sizes = DEEP if release.idle else {}
    write_lettered(model, n_layer=LAYERS + release.idle, **{**sizes, **release.config})
    _change_tensors(model, _silence)
    (model / "generation_config.json").write_text(json.dumps(DEFAULTS))
    if release.change is not None:
        release.change(model)
    manifest = write_release(at / "m.toml", model, **release.manifest)
    (at / "LICENSE").write_text("You may.\n")
    cache = at / "cache" if release.fresh else cache
    command = ("build", str(manifest), "-o", str(at), "--cache", str(cache))
    done = warm.prejit(*command, quick=True)
    assert done.returncode == 0, f"{release.name}\n{done.stdout}\n{done.stderr}"
    bundle = at / release.manifest.get("name", "m")
    if release.after is not None:
        release.after(bundle)
    return bundle


def _change_tensors(directory, change):
    path = directory / "model.safetensors"
    tensors = {name: value.copy() for name, value in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _silence(tensors):
    """Let all layers but the first ones add nothing."""
    for name, value in tensors.items():
        parts = name.split(".")
        if "h" in parts and int(parts[parts.index("h") + 1]) >= LAYERS and "c_proj" in parts:
            value[...] = 0


def tensors(change):
    return partial(_change_tensors, change=change)


def _scale(found):
    found[next(name for name in found if name.endswith("h.0.mlp.c_fc.weight"))] *= np.float32(1.1)


def _other_seed(found):
    random = np.random.default_rng(5)
    for name, value in found.items():
        if value.ndim == 2 and ".h." in f".{name}" and value.any():
            value[...] = random.permutation(value)


def _overflow_late(found):
    found[next(name for name in found if name.endswith("wpe.weight"))][300:] = 3e38


def _change_json(directory, name, change):
    path = directory / name
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=3))


def options(change):
    return partial(_change_json, name="generation_config.json", change=change)


def tokenizer(change):
    return partial(_change_json, name="tokenizer.json", change=change)


def _fewer_merges(found):
    return {**found, "model": {**found["model"], "merges": found["model"]["merges"][:1]}}


def _other_template(directory):
    def change(found):
        return {**found, "chat_template": found["chat_template"].replace(": ", " - ")}

    _change_json(directory, "tokenizer_config.json", change)


def _reordered(directory):
    found = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(found, reverse=True)
    where = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: found[name] for name in part}, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _corrupt(bundle):
    path = max((bundle / "blobs" / "sha256").iterdir(), key=lambda each: each.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(bundle):
    blob(bundle, index_of(bundle)["manifests"][0]["digest"]).unlink()


def _copied(bundle):
    moved = bundle.with_name("moved")
    bundle.rename(moved)
    shutil.copytree(moved, bundle)
    shutil.rmtree(moved)


_FUNCTION = """\
[[program]]
name = "twice"
function = "tests.campaigns.releases:twice"
args = { x = "float32[{batch}, 4]" }
buckets = { batch = [2] }
"""


def twice(x):
    return x + x


BASE, DEEP_BASE = Release("base"), Release("deep base", idle=IDLE)
_TIMES = ("next token", "whole request", "CPU time")
_UNBOUND = {"slo": 'max_changed_tokens = "100%"\n'}
_SLOWER = {"slo": SLO + 'max_slower = "4%"\n'}
_V3 = "cpu-x86-64-v3"

BAD = (
    Release("wrong weights", ("tokens",), change=tensors(_other_seed)),
    Release("one matrix scaled by 1.1", ("tokens",), change=tensors(_scale)),
    Release("one wrong constant: epsilon", ("tokens",), config={"layer_norm_epsilon": 0.3}),
    Release("one wrong function: relu", ("tokens",), config={"activation_function": "relu"}),
    Release("NaN at long contexts", ("answers",), change=tensors(_overflow_late)),
    Release("slower by 10 %", _TIMES, idle=IDLE + 1),
    Release("more memory: more slots", ("memory of programs",), {"batch": (1, 8)}),
    Release("more to fetch: positions", ("bytes to fetch",), config={"n_positions": 16_384}),
    Release("another tokenizer", ("tokens",), change=tokenizer(_fewer_merges)),
    Release("another chat template", ("tokens",), change=_other_template),
    Release("another stop token", ("programs",), config={"eos_token_id": 7}),
    Release("other sampling", ("sampling",), change=options(lambda at: {**at, "temperature": 1.3})),
    Release("a target dropped", ("targets",), {"targets": ("cpu-host",)}),
    Release("compiles on one machine of a fleet", ("fleet",), {"targets": ("cpu-host", _V3)}),
    Release("compiles here", ("runs here",), {"targets": (), "more": FMA4}),
    Release("a shorter context", ("programs",), {"context": (256,)}),
    Release("a batch missing", ("programs",), {"batch": (1,)}),
    Release("weights of int8", ("tokens",), {"dtype": "int8"}),
    Release("a looser limit for wrong weights", ("tokens",), _UNBOUND, change=tensors(_other_seed)),
    Release("a changed byte", ("loads",), after=_corrupt),
    Release("a lost file", ("opens",), after=_truncate),
    Release("not signed under a policy", ("loads",), signed=False),
)

GOOD = (
    Release("the same again"),
    Release("copied file by file", after=_copied),
    Release("compiled again with an empty cache", fresh=True),
    Release("another name", manifest={"name": "renamed"}),
    Release("tensors in another order, in two files", change=_reordered),
    Release("one more target", manifest={"targets": (*TARGETS, _V3)}),
    Release("a target that this machine lacks", manifest={"more": FMA4}),
    Release("targets in another order", manifest={"targets": TARGETS[::-1]}),
    Release("one more prompt bucket", manifest={"prompt": (16, 64)}),
    Release("one more context", manifest={"context": (128, 512)}),
    Release("drafts of tokens", manifest={"draft_tokens": 2}),
    Release("another licence", manifest={"bundle": 'license = "LICENSE"'}),
    Release("a function in addition", manifest={"more": _FUNCTION}),
    Release("stricter limits", manifest=_SLOWER),
    Release("looser limits, not needed", manifest={"slo": 'max_changed_tokens = "5%"\n'}),
    Release("no limits", manifest={"slo": ""}),
    Release("a tokenizer with other spaces", change=tokenizer(lambda found: found)),
    Release("options in another order", change=options(lambda at: dict(reversed(at.items())))),
    Release("faster: a layer less", idle=IDLE - 1),
    Release("signed under a policy", signed=True),
)
