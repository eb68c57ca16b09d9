"""Releases of one small model: twenty that must not take the place of the base, and twenty that may."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tests.layouts import blob, index_of
from tests.lettered import write_lettered

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
class Manifest:
    """What a manifest says."""

    name: str = "m"
    targets: tuple[str, ...] = TARGETS
    batch: tuple[int, ...] = (1, 2)
    prompt: tuple[int, ...] = (64,)
    context: tuple[int, ...] = (512,)
    draft_tokens: int = 0
    dtype: str = "float32"
    slo: str = SLO
    license: str = ""
    more: str = ""

    def text(self, model):
        targets = "".join(
            each if "\n" in each else f'[[target]]\nname = "{each}"\n' for each in self.targets
        )
        licence = 'license = "LICENSE"\n' if self.license else ""
        return (
            f'[bundle]\nname = "{self.name}"\n{licence}[model]\nsource = {json.dumps(str(model))}\n'
            f'dtype = "{self.dtype}"\n[generate]\nbatch = {list(self.batch)}\nprompt = {list(self.prompt)}\n'
            f"context = {list(self.context)}\n"
            f"draft_tokens = {self.draft_tokens}\n[slo]\n{self.slo}{self.more}{targets}"
        )


Change = Callable[[Path], object]  # changes the files of a model, or those of a bundle


@dataclass(frozen=True)
class Release:
    """A release beside the base."""

    name: str
    checks: tuple[str, ...] = ()
    manifest: Manifest = field(default_factory=Manifest)
    config: Mapping[str, Any] = field(default_factory=dict)
    idle: int = 0
    change: Change | None = None
    after: Change | None = None
    fresh: bool = False
    signed: bool | None = None


def base_of(release):
    """Return the release beside which another one is judged."""
    return DEEP_BASE if release.idle else BASE


def write_model(directory, release):
    sizes = DEEP if release.idle else {}
    write_lettered(directory, n_layer=LAYERS + release.idle, **{**sizes, **release.config})
    _change_tensors(directory, _silence)
    (directory / "generation_config.json").write_text(json.dumps(DEFAULTS))
    if release.change is not None:
        release.change(directory)
    return directory


def build_release(warm, at, cache, release):
    """Build a release in a directory, and return the directory of its bundle."""
    model = write_model(at / "model", release)
    manifest = at / "m.toml"
    manifest.write_text(release.manifest.text(model))
    (at / "LICENSE").write_text(release.manifest.license)
    command = (
        "build",
        str(manifest),
        "-o",
        str(at),
        "--cache",
        str(at / "cache" if release.fresh else cache),
    )
    done = warm.prejit(*command, quick=True)
    assert done.returncode == 0, f"{release.name}\n{done.stdout}\n{done.stderr}"
    bundle = at / release.manifest.name
    if release.after is not None:
        release.after(bundle)
    return bundle


# ---------------------------------------------------------------------- changes of a model


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
    """Return a change of the tensors of a checkpoint."""
    return lambda directory: _change_tensors(directory, change)


def _scale(found):
    found[next(name for name in found if name.endswith("h.0.mlp.c_fc.weight"))] *= np.float32(1.1)


def _other_seed(found):
    random = np.random.default_rng(5)
    for name, value in found.items():
        if value.ndim == 2 and ".h." in f".{name}" and value.any():
            value[...] = random.permutation(value)


def _overflow_late(found):
    found[next(name for name in found if name.endswith("wpe.weight"))][300:] = 3e38


def change_json(name, change):
    """Return a change of a JSON file of a checkpoint."""

    def write(directory):
        path = directory / name
        found = json.loads(path.read_text())
        path.write_text(json.dumps(change(found) or found, indent=3))

    return write


def _fewer_merges(tokenizer):
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:1]


def _reordered(directory):
    """Write the same tensors in another order, in two files."""
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


# ---------------------------------------------------------------------- changes of a bundle


def _corrupt(bundle):
    """Change a byte in the middle of the weights, the largest file."""
    path = max((bundle / "blobs" / "sha256").iterdir(), key=lambda each: each.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(bundle):
    """Lose the manifest of a target."""
    blob(bundle, index_of(bundle)["manifests"][0]["digest"]).unlink()


def _copied(bundle):
    """Copy it file by file, as an archive does."""
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
    """A function that a release may have in addition."""
    return x + x


BASE, DEEP_BASE = Release("base"), Release("deep base", idle=IDLE)
_M = Manifest

BAD = (
    Release("wrong weights", ("tokens",), change=tensors(_other_seed)),
    Release("one matrix scaled by 1.1", ("tokens",), change=tensors(_scale)),
    Release(
        "one wrong constant: the epsilon of norms", ("tokens",), config={"layer_norm_epsilon": 0.3}
    ),
    Release("one wrong function: relu", ("tokens",), config={"activation_function": "relu"}),
    Release("NaN at long contexts", ("answers",), change=tensors(_overflow_late)),
    Release("slower by 10 %", ("next token", "whole request", "CPU time"), idle=IDLE + 1),
    Release("more memory: more slots", ("memory of programs",), _M(batch=(1, 8))),
    Release(
        "more to fetch: positions that nobody uses",
        ("bytes to fetch",),
        config={"n_positions": 16_384},
    ),
    Release("another tokenizer", ("tokens",), change=change_json("tokenizer.json", _fewer_merges)),
    Release(
        "another chat template",
        ("tokens",),
        change=change_json(
            "tokenizer_config.json",
            lambda found: {**found, "chat_template": found["chat_template"].replace(": ", " - ")},
        ),
    ),
    Release("another stop token", ("programs",), config={"eos_token_id": 7}),
    Release(
        "other sampling",
        ("sampling",),
        change=change_json("generation_config.json", lambda found: {**found, "temperature": 1.3}),
    ),
    Release("a target dropped", ("targets",), _M(targets=("cpu-host",))),
    Release(
        "compiles on one machine of a fleet", ("fleet",), _M(targets=("cpu-host", "cpu-x86-64-v3"))
    ),
    Release("compiles here", ("runs here",), _M(targets=(FMA4,))),
    Release("a shorter context", ("programs",), _M(context=(256,))),
    Release("a batch missing", ("programs",), _M(batch=(1,))),
    Release("weights of int8", ("tokens",), _M(dtype="int8")),
    Release(
        "a looser limit for wrong weights",
        ("tokens",),
        _M(slo='max_changed_tokens = "100%"\n'),
        change=tensors(_other_seed),
    ),
    Release("a changed byte", ("loads",), after=_corrupt),
    Release("a lost file", ("opens",), after=_truncate),
    Release("not signed under a policy", ("loads",), signed=False),
)
"""Releases that must be stopped, each by the check that is named."""

GOOD = (
    Release("the same again"),
    Release("copied file by file", after=_copied),
    Release("compiled again with an empty cache", fresh=True),
    Release("another name", manifest=_M(name="renamed")),
    Release("tensors in another order, in two files", change=_reordered),
    Release("one more target", manifest=_M(targets=(*TARGETS, "cpu-x86-64-v3"))),
    Release("a target that this machine lacks", manifest=_M(targets=(*TARGETS, FMA4))),
    Release("targets in another order", manifest=_M(targets=TARGETS[::-1])),
    Release("one more prompt bucket", manifest=_M(prompt=(16, 64))),
    Release("one more context", manifest=_M(context=(128, 512))),
    Release("drafts of tokens", manifest=_M(draft_tokens=2)),
    Release("another licence", manifest=_M(license="You may.\n")),
    Release("a function in addition", manifest=_M(more=_FUNCTION)),
    Release("stricter limits", manifest=_M(slo=SLO + 'max_slower = "4%"\n')),
    Release("looser limits that it does not need", manifest=_M(slo='max_changed_tokens = "5%"\n')),
    Release("no limits", manifest=_M(slo="")),
    Release(
        "a tokenizer with other spaces", change=change_json("tokenizer.json", lambda found: found)
    ),
    Release(
        "options in another order",
        change=change_json("generation_config.json", lambda found: dict(reversed(found.items()))),
    ),
    Release("faster: a layer less", idle=IDLE - 1),
    Release("signed under a policy", signed=True),
)
"""Releases that may take the place of the base."""
