"""Checkpoints as they are published, whole and damaged; where they come from; parameters of users."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax import serialization, traverse_util
from safetensors.numpy import save_file
from tests.parity.cases import shapes_of
from tests.unit.compiler.models import small_models

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.checkpoint.model_source import resolve_source
from prejit.compiler.checkpoint.tensor_files import read_parameters
from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.parameters import parameters_of
from prejit.runtime.errors import CheckpointError, ManifestError, NetworkError

Tensors = dict[str, np.ndarray[Any, Any]]

GPT2 = {
    **{**small_models.GPT2, "vocab_size": 11, "n_positions": 8, "n_embd": 6, "n_head": 2},
    **{"n_layer": 1, "n_inner": None, "tie_word_embeddings": True},
}
LLAMA = {
    **{**small_models.LLAMA, "vocab_size": 11, "hidden_size": 4, "intermediate_size": 10},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
    "tie_word_embeddings": False,
}


def drawn(config: dict[str, Any]) -> Tensors:
    """Random tensors as torch's models publish them: Conv1D matrices (in, out)."""
    random = np.random.default_rng(0)
    shapes = shapes_of(config)
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def gpt2() -> Tensors:
    """The parameters of GPT2 with random values, matrices (out, in)."""
    return as_torch(drawn(GPT2))


def llama() -> Tensors:
    """The parameters of LLAMA with random values, matrices (out, in)."""
    return drawn(LLAMA)


def is_conv1d(name: str) -> bool:
    return name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def as_torch(ours: Tensors) -> Tensors:
    """As transformers' torch models publish it, or back: Conv1D matrices (in, out)."""
    return {n: np.ascontiguousarray(v.T) if is_conv1d(n) else v for n, v in ours.items()}


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_flax(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    nested = traverse_util.unflatten_dict(tensors, sep=".")
    (directory / "flax_model.msgpack").write_bytes(serialization.msgpack_serialize(nested))
    return directory


def assert_reads(directory: Path, ours: Tensors) -> None:
    checkpoint = open_checkpoint(directory)
    parameters = parameters_of(model_registry.make_decoder(config_file.load_config(directory)))
    assert list(checkpoint.names) == list(parameters) == sorted(ours)
    for name, parameter in parameters.items():
        read = checkpoint.read(name)
        assert (read.dtype, read.shape) == (np.float32, parameter.shape)
        assert read.flags.c_contiguous
        assert np.array_equal(read.T if parameter.in_out else read, ours[name]), name


# --- As published ----------------------------------------------------------------------------------


def test_torch_names_with_and_without_the_prefix_and_with_buffers(tmp_path: Path) -> None:
    assert_reads(write(tmp_path, GPT2, as_torch(gpt2())), gpt2())
    assert_reads(write(tmp_path, LLAMA, llama()), llama())
    published = {n.removeprefix("transformer."): v for n, v in as_torch(gpt2()).items()}
    published["h.0.attn.bias"] = np.tril(np.ones((1, 1, 8, 8), np.float32))
    published["h.0.attn.masked_bias"] = np.array(-1e4, np.float32)
    assert_reads(write(tmp_path, GPT2, published), gpt2())


def test_a_tied_head_may_be_stored_beside_the_embedding_or_alone(tmp_path: Path) -> None:
    both = as_torch(gpt2())
    both["lm_head.weight"] = both["transformer.wte.weight"].copy()
    assert_reads(write(tmp_path, GPT2, both), gpt2())
    other = {**both, "lm_head.weight": np.zeros((11, 6), np.float32)}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from transformer\.wte"):
        _ = open_checkpoint(write(tmp_path, GPT2, other)).names
    del both["transformer.wte.weight"]
    assert_reads(write(tmp_path, GPT2, both), gpt2())


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_other_float_types_are_cast(dtype: Any, tmp_path: Path) -> None:
    stored = {name: values.astype(dtype) for name, values in llama().items()}
    cast = {name: values.astype(np.float32) for name, values in stored.items()}
    assert_reads(write(tmp_path, LLAMA, stored), cast)


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    names = sorted(llama())
    where = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(names)}
    for shard in set(where.values()):
        save_file({n: v for n, v in llama().items() if where[n] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert_reads(tmp_path, llama())
    files = [file.name for file in open_checkpoint(tmp_path).files]
    assert files == ["config.json", "model.safetensors.index.json", *sorted(set(where.values()))]
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected 3 files .* missing model-00002-of-00003"):
        open_checkpoint(tmp_path)


def test_flax_gpt2_of_transformers_and_with_dense_layers(tmp_path: Path) -> None:
    """Kernels of FlaxConv1D are (out, in), those of nn.Dense (in, out), square ones too."""
    ends = {".wte.weight": ".wte.embedding", ".wpe.weight": ".wpe.embedding"}
    named = _flax_names(gpt2(), ends)
    assert_reads(write_flax(tmp_path, GPT2, named), gpt2())
    dense = {
        f"params.{n.removeprefix('transformer.')}": v.T if n.endswith(".kernel") else v
        for n, v in named.items()
    }
    assert_reads(write_flax(tmp_path, GPT2, dense), gpt2())


def test_flax_llama(tmp_path: Path) -> None:
    """FlaxLlamaRMSNorm calls its scale `weight`."""
    named = {
        n.replace("embed_tokens.weight", "embed_tokens.embedding")
        if "norm" in n or "embed" in n
        else n.replace(".weight", ".kernel"): v.T if v.ndim == 2 and "embed" not in n else v
        for n, v in llama().items()
    }
    assert_reads(write_flax(tmp_path, LLAMA, named), llama())


def _flax_names(ours: Tensors, ends: dict[str, str]) -> Tensors:
    named = {}
    for name, values in ours.items():
        end = next((e for e in ends if name.endswith(e)), ".weight")
        new = ends.get(end) or (".kernel" if is_conv1d(name) else ".scale")
        named[name.removesuffix(end) + new if name.endswith(end) else name] = values
    return named


# --- Not as it should be ---------------------------------------------------------------------------


def test_everything_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    tensors = as_torch(gpt2())
    del tensors["transformer.ln_f.bias"]
    tensors["transformer.h.1.ln_1.bias"] = np.zeros(6, np.float32)
    tensors["transformer.h.0.mlp.c_fc.weight"] = np.zeros((6, 23), np.float32)
    tensors["transformer.h.0.ln_2.bias"] = np.zeros(6, np.int32)
    tensors["wpe.weight"] = np.zeros((8, 6), np.float32)
    checkpoint = open_checkpoint(write(tmp_path, GPT2, tensors))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read("transformer.wte.weight")
    for said in (
        "missing transformer.ln_f.bias",
        "unexpected transformer.h.1.ln_1.bias",
        "transformer.h.0.mlp.c_fc.weight in model.safetensors (expected [6, 24], found [6, 23])",
        "transformer.h.0.ln_2.bias is I32, expected a float",
        "both transformer.wpe.weight and wpe.weight are given",
    ):
        assert said in str(caught.value)
    tensors = {"transformer.wte.weight": gpt2()["transformer.wte.weight"]}
    with pytest.raises(CheckpointError, match="and 7 more"):
        _ = open_checkpoint(write(tmp_path, GPT2, tensors)).names


@pytest.mark.parametrize("name", ["score.weight", "v_head.summary.weight"])
def test_the_head_of_a_reward_model_is_refused(name: str, tmp_path: Path) -> None:
    tensors = {**llama(), name: np.ones((1, 4), np.float32)}
    with pytest.raises(CheckpointError, match=f"unexpected {name}") as caught:
        _ = open_checkpoint(write(tmp_path, LLAMA, tensors)).names
    assert "a part that prejit does not build" in str(caught.value.hint)
    classified = {**LLAMA, "architectures": ["LlamaForSequenceClassification"]}
    with pytest.raises(CheckpointError, match=r"expected .* for \[generate\], found \"LlamaForSeq"):
        _ = open_checkpoint(write(tmp_path, classified, llama())).names


@pytest.mark.parametrize("how", [write, write_flax])
def test_a_truncated_file_is_named(how: Callable[..., Path], tmp_path: Path) -> None:
    [file] = {*how(tmp_path, LLAMA, llama()).iterdir()} - {tmp_path / "config.json"}
    content = file.read_bytes()
    for kept in (0, 5, 100, -1):
        file.write_bytes(content[:kept])
        with pytest.raises(CheckpointError, match=re.escape(f"{file}: damaged or cut off")):
            _ = open_checkpoint(tmp_path).names


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('{"weight_map": ["model.safetensors"]}', "weight_map: expected an object"),
        ('{"weight_map": {"a": "x.safetensors", "b": {}}}', 'weight_map: "b": expected the name'),
        ('{"weight_map": {"a": "../x.safetensors"}}', 'found "../x.safetensors"'),
        ('{"weight_map": {"a": "x.safetensors"}}', "missing x.safetensors"),
        ('{"weight_map": {"a": "\\u0000.safetensors"}}', "missing"),
        ('{"weight_map": {"a": 1' + "0" * 5000 + "}}", "cannot read"),
        ("\xff", "utf-8"),
    ],
)
def test_an_index_of_another_form_is_refused(index: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    file = tmp_path / "model.safetensors.index.json"
    file.write_bytes(index.encode("latin-1"))
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        open_checkpoint(tmp_path)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_no_numbers_are_refused(value: float, tmp_path: Path) -> None:
    tensors = as_torch(gpt2())
    tensors["transformer.h.0.mlp.c_fc.weight"][2, 3] = value
    checkpoint = open_checkpoint(write(tmp_path, GPT2, tensors))
    with pytest.raises(CheckpointError, match="found 1 of 144 that are NaN or infinite") as caught:
        checkpoint.read("transformer.h.0.mlp.c_fc.weight")
    assert str(tmp_path / "model.safetensors") in str(caught.value)
    assert "transformer.h.0.mlp.c_fc.weight" in str(caught.value)


def test_weights_beyond_float32_are_refused_and_those_near_its_end_are_not(tmp_path: Path) -> None:
    tensors = as_torch(gpt2())
    tensors["transformer.wte.weight"][:] = 3e38  # the sum is more than float32 holds
    tensors["transformer.wpe.weight"] = np.full((8, 6), 1e39)
    checkpoint = open_checkpoint(write(tmp_path, GPT2, tensors))
    assert (checkpoint.read("transformer.wte.weight") == np.float32(3e38)).all()
    with pytest.raises(CheckpointError, match="found 48 of 48 that are NaN or infinite"):
        checkpoint.read("transformer.wpe.weight")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: expected a file, found none"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    with pytest.raises(CheckpointError, match=r"expected weights in one of .* found none"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin") as caught:
        open_checkpoint(tmp_path)
    assert "pickle" in str(caught.value.hint)
    (tmp_path / "model-Q8_0.gguf").touch()
    with pytest.raises(
        CheckpointError, match=r"found model-Q8_0\.gguf, pytorch_model\.bin"
    ) as caught:
        open_checkpoint(tmp_path)
    assert "GGUF" in str(caught.value.hint)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected a file, found model-Q8_0\.gguf") as caught:
        open_checkpoint(tmp_path)
    assert "GGUF" in str(caught.value.hint)
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="weight_map: expected an object"):
        open_checkpoint(tmp_path)


# --- Where it comes from ---------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """A server with as much of the Hub's interface as a snapshot takes, and one repository, org/model."""

    commit = "0123456789abcdef0123456789abcdef01234567"
    files: dict[str, bytes] = {}  # noqa: RUF012
    fetched: list[str] = []  # noqa: RUF012

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, *, body: bool = True) -> None:
        name = self.path.partition(f"/org/model/resolve/{self.commit}/")[2]
        if self.path.startswith("/api/models/org/model/tree/"):
            tree = [
                {
                    "type": "file",
                    "path": file,
                    "size": len(content),
                    "oid": sha256(content).hexdigest(),
                }
                for file, content in self.files.items()
            ]
            self.answer(200, json.dumps(tree).encode(), body)
        elif self.path.startswith("/api/models/org/model/"):
            siblings = [{"rfilename": file} for file in self.files]
            content = json.dumps({"id": "org/model", "sha": self.commit, "siblings": siblings})
            self.answer(200, content.encode(), body)
        elif self.path.startswith("/api/models/org/gated/"):
            self.answer(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
        elif name in self.files:
            if body:
                self.fetched.append(name)
            tags = {
                "ETag": f'"{sha256(self.files[name]).hexdigest()}"',
                "X-Repo-Commit": self.commit,
            }
            self.answer(200, self.files[name], body, tags)
        else:
            self.answer(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

    def answer(self, status: int, content: bytes, body: bool, headers: dict[str, str] = {}) -> None:  # noqa: B006
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.files, Hub.fetched = {"config.json": b"{}", "README.md": b"", "model.safetensors": b"1"}, []
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield Hub
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "source", ["nowhere", "hf://", "hf://name", "hf://a/b/c", "hf://org/name@"]
)
def test_a_source_is_beside_the_manifest_or_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "demo-model").mkdir()
    assert resolve_source("demo-model", tmp_path) == tmp_path / "demo-model"
    assert resolve_source(str(tmp_path), Path("elsewhere")) == tmp_path
    with pytest.raises(ManifestError, match=r"model\.source: expected"):
        resolve_source(source, tmp_path)


def test_a_snapshot_holds_all_that_a_build_reads_and_one_format_of_the_weights(
    hub: type[Hub], tmp_path: Path
) -> None:
    read = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    read |= {"chat_template.jinja", "additional_chat_templates/tool_use.jinja", "LICENSE.md"}
    read |= {"1_Pooling/config.json", "model.safetensors.index.json"}
    weights = {f"model{of}.safetensors" for of in ("", "-00001-of-00002")}
    others = {"pytorch_model.bin", "flax_model.msgpack", "tf_model.h5"}
    hub.files = {name: name.encode() for name in (*read, *weights, *others)}
    directory = resolve_source("hf://org/model@main", tmp_path, weights=False)
    assert directory.name == hub.commit
    assert {*hub.fetched} == read
    assert resolve_source("hf://org/model@main", tmp_path) == directory
    assert {*hub.fetched} == read | weights


def test_flax_weights_are_fetched_where_alone(hub: type[Hub], tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "flax_model.msgpack": b"2", "pytorch_model.bin": b"3"}
    directory = resolve_source("hf://org/model", tmp_path)
    assert sorted(file.name for file in directory.iterdir()) == [
        "config.json",
        "flax_model.msgpack",
    ]


def test_what_the_cache_holds_needs_no_network(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    online = resolve_source("hf://org/model", tmp_path)
    hub.fetched.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_source("hf://org/model", tmp_path) == online
    assert not hub.fetched
    with pytest.raises(NetworkError, match=r"hf://org/other: .*HF_HUB_OFFLINE is set") as caught:
        resolve_source("hf://org/other", tmp_path)
    assert "hf download org/other --local-dir DIR" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "said"), [("other", "has no such repository"), ("gated", "does not let this account")]
)
def test_a_closed_repository_is_named(hub: type[Hub], name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"hf://org/{name}: .* {said}"):
        resolve_source(f"hf://org/{name}", tmp_path)


# --- Parameters of users ---------------------------------------------------------------------------


NESTED: dict[str, Any] = {
    "layer": {"w": np.ones((2, 3), np.float32), "steps": np.arange(3)},
    "scale": np.float32(2),
}
FLAT = {
    "layer.w": NESTED["layer"]["w"],
    "layer.steps": NESTED["layer"]["steps"],
    "scale": NESTED["scale"],
}


def assert_equal(read: Tensors, expected: dict[str, Any]) -> None:
    assert sorted(read) == sorted(expected)
    for name, values in expected.items():
        assert isinstance(read[name], np.ndarray)
        assert read[name].dtype == values.dtype
        assert np.array_equal(read[name], values)


@pytest.mark.parametrize("name", ["nothing", "params.npz"])
def test_parameters_keep_their_types_and_have_known_formats(tmp_path: Path, name: str) -> None:
    tensors = {"layer.w": np.ones((2, 3), ml_dtypes.bfloat16), "layer.steps": np.arange(3)}
    save_file(tensors, tmp_path / "p.safetensors")
    assert_equal(read_parameters(tmp_path / "p.safetensors"), tensors)
    (tmp_path / "params.npz").touch()
    with pytest.raises(CheckpointError, match=r"expected a \.safetensors file or an orbax"):
        read_parameters(tmp_path / name)


def test_parameters_from_orbax(tmp_path: Path) -> None:
    from flax import nnx
    from orbax import checkpoint as ocp

    with ocp.StandardCheckpointer() as standard:
        standard.save(tmp_path / "standard", NESTED)
        linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        standard.save(tmp_path / "nnx", nnx.state(linear))
    with ocp.PyTreeCheckpointer() as pytree:
        pytree.save(tmp_path / "pytree", NESTED)
    with ocp.CheckpointManager(tmp_path / "manager") as manager:
        manager.save(7, args=ocp.args.StandardSave(NESTED))
    for name in ("standard", "pytree", "manager/7"):
        assert_equal(read_parameters(tmp_path / name), FLAT)
    assert_equal(
        read_parameters(tmp_path / "nnx"),
        {"kernel": np.asarray(linear.kernel[...]), "bias": np.zeros(3, np.float32)},
    )
    with pytest.raises(CheckpointError, match="_METADATA") as caught:
        read_parameters(tmp_path / "manager")
    assert str(tmp_path / "manager" / "7") in str(caught.value.hint)
    from orbax import checkpoint as ocp

    with ocp.PyTreeCheckpointer() as pytree:
        pytree.save(tmp_path / "c", NESTED)
    (tmp_path / "c" / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / 'c'}: orbax cannot restore")):
        read_parameters(tmp_path / "c")
