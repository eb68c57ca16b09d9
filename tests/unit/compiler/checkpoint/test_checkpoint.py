"""Checkpoints as they are published, whole and damaged; where they come from; parameters of users."""

import json
import re
from hashlib import sha256
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax import serialization, traverse_util
from safetensors.numpy import load_file, save_file
from tests.http_serving import QuietHandler, serving
from tests.parity import t5_cases
from tests.parity.cases import shapes_of, write_checkpoint
from tests.parity.sibling_cases import cases as siblings
from tests.unit.compiler.models import small_models

from prejit.compiler.checkpoint import tensor_files
from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.checkpoint.model_source import resolve_source
from prejit.compiler.checkpoint.tensor_files import read_parameters
from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.parameters import parameters_of
from prejit.runtime.errors import CheckpointError, ManifestError, NetworkError

GPT2 = {
    **{**small_models.GPT2, "vocab_size": 11, "n_positions": 8, "n_embd": 6, "n_head": 2},
    **{"n_layer": 1, "n_inner": None, "tie_word_embeddings": True},
}
LLAMA = {
    **{**small_models.LLAMA, "vocab_size": 11, "hidden_size": 4, "intermediate_size": 10},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
    "tie_word_embeddings": False,
}


def drawn(config):
    """Random tensors of a model by their published names, matrices (out, in)."""
    random = np.random.default_rng(0)
    shapes = shapes_of(config)
    return as_torch({n: random.standard_normal(each, np.float32) for n, each in shapes.items()})


def is_conv1d(name):
    return name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))


def as_torch(ours):
    """As transformers' torch models publish it, or back: Conv1D matrices (in, out)."""
    return {n: np.ascontiguousarray(v.T) if is_conv1d(n) else v for n, v in ours.items()}


def write(directory, config, tensors):
    write_checkpoint(directory, config, tensors)
    return directory


def write_flax(directory, config, tensors):
    (directory / "config.json").write_text(json.dumps(config))
    nested = traverse_util.unflatten_dict(tensors, sep=".")
    (directory / "flax_model.msgpack").write_bytes(serialization.msgpack_serialize(nested))
    return directory


def assert_reads(directory, ours):
    checkpoint = open_checkpoint(directory)
    parameters = parameters_of(model_registry.make_decoder(config_file.load_config(directory)))
    assert list(checkpoint.names) == list(parameters) == sorted(ours)
    for name, parameter in parameters.items():
        read = checkpoint.read(name)
        assert (read.dtype, read.shape) == (np.float32, parameter.shape)
        assert read.flags.c_contiguous
        assert np.array_equal(read.T if parameter.in_out else read, ours[name]), name


def test_torch_names_a_tied_head_and_other_floats_are_read_as_published(tmp_path):
    gpt2, llama = drawn(GPT2), drawn(LLAMA)
    assert_reads(write(tmp_path, GPT2, as_torch(gpt2)), gpt2)
    assert_reads(write(tmp_path, LLAMA, llama), llama)
    published = {n.removeprefix("transformer."): v for n, v in as_torch(gpt2).items()}
    published["h.0.attn.bias"] = np.tril(np.ones((1, 1, 8, 8), np.float32))
    published["h.0.attn.masked_bias"] = np.array(-1e4, np.float32)
    assert_reads(write(tmp_path, GPT2, published), gpt2)
    embedding, head = "transformer.wte.weight", "lm_head.weight"
    both = as_torch(gpt2)
    both[head] = both[embedding].copy()
    assert_reads(write(tmp_path, GPT2, both), gpt2)
    other = {**both, head: both[head].copy()}
    other[head][-1, -1] += 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from transformer\.wte"):
        _ = open_checkpoint(write(tmp_path, GPT2, other)).names
    del both[embedding]
    assert_reads(write(tmp_path, GPT2, both), gpt2)
    for dtype in (np.float64, np.float16, ml_dtypes.bfloat16):
        stored = {name: values.astype(dtype) for name, values in llama.items()}
        cast = {name: values.astype(np.float32) for name, values in stored.items()}
        assert_reads(write(tmp_path, LLAMA, stored), cast)


@pytest.mark.parametrize("out_in", [True, False])
def test_a_t5_without_a_head_has_its_embedding_unscaled(out_in, tmp_path):
    """transformers 5 ties every T5 that it makes, also one whose outputs are not scaled."""
    t5_cases.cases()[0].write(tmp_path)
    file, name = tmp_path / "model.safetensors", "lm_head.weight"
    held = load_file(file)
    del held[name]
    save_file(held, file)
    module = model_registry.make_decoder(config_file.load_config(tmp_path), out_in=out_in)
    head = open_checkpoint(tmp_path, out_in=out_in).read(name)
    head = head.T if parameters_of(module)[name].in_out else head
    np.testing.assert_array_equal(head, held["shared.weight"])


def test_shards_are_read_through_their_index(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    names = sorted(drawn(LLAMA))
    where = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(names)}
    for shard in set(where.values()):
        save_file({n: v for n, v in drawn(LLAMA).items() if where[n] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert_reads(tmp_path, drawn(LLAMA))
    files = [file.name for file in open_checkpoint(tmp_path).files]
    assert files == ["config.json", "model.safetensors.index.json", *sorted(set(where.values()))]
    other = tmp_path / "model-00003-of-00003.safetensors"
    kept, twice = load_file(other), {names[0]: drawn(LLAMA)[names[0]] + 1}
    save_file({**kept, **twice}, other)
    assert_reads(tmp_path, drawn(LLAMA))  # the index says which of two is meant
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {n: file for n, file in where.items() if n != names[0]}})
    )
    said = f"both model-00001-of-00003.safetensors and {other.name} hold {names[0]}"
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        _ = open_checkpoint(tmp_path).names
    assert "the index may name one" in caught.value.hint
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected 3 files .* missing model-00002-of-00003"):
        open_checkpoint(tmp_path)


def test_two_matrices_of_one_expert_are_refused(tmp_path):
    case = next(case for case in siblings() if case.name == "qwen3_moe-0")
    case.write(tmp_path)
    block, tensors = "model.layers.0.mlp.experts.", load_file(tmp_path / "model.safetensors")
    stack = [tensors[f"{block}{n}.down_proj.weight"] for n in range(case.config["num_experts"])]
    whole = open_checkpoint(tmp_path, out_in=True)
    assert np.array_equal(whole.read(f"{block}down_proj.weight"), stack)
    name = f"{block}1.up_proj.weight"
    for again in (f"{block}01.up_proj.weight", name.removeprefix("model.")):
        doubled = write(tmp_path, case.config, {**tensors, again: tensors[name] + 1})
        with pytest.raises(CheckpointError, match=r"both .*1\.up.* and .*1\.up_proj.* are given"):
            _ = open_checkpoint(doubled).names


def test_names_and_layouts_of_flax(tmp_path):
    """Kernels of FlaxConv1D are (out, in), those of nn.Dense (in, out), square ones too."""

    def of_flax(name):
        if ".wte." in name or ".wpe." in name:
            return name.replace(".weight", ".embedding")
        return name.replace(".weight", ".kernel" if is_conv1d(name) else ".scale")

    named = {of_flax(name): values for name, values in drawn(GPT2).items()}
    assert_reads(write_flax(tmp_path, GPT2, named), drawn(GPT2))
    dense = {
        f"params.{n.removeprefix('transformer.')}": v.T if n.endswith(".kernel") else v
        for n, v in named.items()
    }
    assert_reads(write_flax(tmp_path, GPT2, dense), drawn(GPT2))
    # FlaxLlamaRMSNorm calls its scale `weight`.
    named = {
        n.replace("embed_tokens.weight", "embed_tokens.embedding")
        if "norm" in n or "embed" in n
        else n.replace(".weight", ".kernel"): v.T if v.ndim == 2 and "embed" not in n else v
        for n, v in drawn(LLAMA).items()
    }
    assert_reads(write_flax(tmp_path, LLAMA, named), drawn(LLAMA))


def test_everything_that_does_not_fit_is_said_at_once(tmp_path):
    tensors = as_torch(drawn(GPT2))
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
    matrix = "model.layers.0.mlp.up_proj.weight"  # outputs come first in the file, and here
    turned = np.zeros((5, drawn(LLAMA)[matrix].shape[1]), np.float32)
    with pytest.raises(CheckpointError, match=rf"expected \[\d+, {turned.shape[1]}\], found \[5, "):
        _ = open_checkpoint(write(tmp_path, LLAMA, {**drawn(LLAMA), matrix: turned})).names
    tensors = {"transformer.wte.weight": drawn(GPT2)["transformer.wte.weight"]}
    with pytest.raises(CheckpointError, match="and 7 more"):
        _ = open_checkpoint(write(tmp_path, GPT2, tensors)).names
    for name in ("score.weight", "v_head.summary.weight"):
        tensors = {**drawn(LLAMA), name: np.ones((1, 4), np.float32)}
        with pytest.raises(CheckpointError, match=f"unexpected {name}") as caught:
            _ = open_checkpoint(write(tmp_path, LLAMA, tensors)).names
        assert "a part that prejit does not build" in str(caught.value.hint)
    classified = {**LLAMA, "architectures": ["LlamaForSequenceClassification"]}
    with pytest.raises(CheckpointError, match=r"expected .* for \[generate\], found \"LlamaForSeq"):
        _ = open_checkpoint(write(tmp_path, classified, drawn(LLAMA))).names


CHANGED_HEADERS = [b"", bytes(8), b"\2" + bytes(7) + b"[]", b"\2" + bytes(7) + b"{}"]


@pytest.mark.parametrize("content", CHANGED_HEADERS)
def test_a_header_that_changes_between_two_looks_is_damage(content, tmp_path, monkeypatch):
    directory, look = write(tmp_path, LLAMA, drawn(LLAMA)), tensor_files._places

    def places(path):
        path.write_bytes(content)
        return look(path)

    monkeypatch.setattr(tensor_files, "_places", places)
    with pytest.raises(CheckpointError, match="damaged or cut off"):
        _ = open_checkpoint(directory).names


@pytest.mark.parametrize("how", [write, write_flax])
def test_a_truncated_file_is_named(how, tmp_path):
    [file] = {*how(tmp_path, LLAMA, drawn(LLAMA)).iterdir()} - {tmp_path / "config.json"}
    content = file.read_bytes()
    for kept in (0, 5, 100, -1):
        file.write_bytes(content[:kept])
        with pytest.raises(CheckpointError, match=re.escape(f"{file}: damaged or cut off")):
            _ = open_checkpoint(tmp_path).names


def test_an_index_of_another_form_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    file = tmp_path / "model.safetensors.index.json"
    for index, said in (
        ("[]", "weight_map: expected an object"),
        ('{"weight_map": ["model.safetensors"]}', "weight_map: expected an object"),
        ('{"weight_map": {"a": "x.safetensors", "b": {}}}', 'weight_map: "b": expected the name'),
        ('{"weight_map": {"a": "../x.safetensors"}}', 'found "../x.safetensors"'),
        ('{"weight_map": {"a": "x.safetensors"}}', "missing x.safetensors"),
        ('{"weight_map": {"a": "\\u0000.safetensors"}}', "missing"),
        ('{"weight_map": {"a": 1' + "0" * 5000 + "}}", "cannot read"),
        ("\xff", "utf-8"),
    ):
        file.write_bytes(index.encode("latin-1"))
        with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
            open_checkpoint(tmp_path)
        assert str(file) in str(caught.value)


def test_weights_that_are_no_numbers_or_beyond_float32_are_refused(tmp_path):
    tensors, name = as_torch(drawn(GPT2)), "transformer.h.0.mlp.c_fc.weight"
    for value in (np.nan, -np.inf):
        tensors[name][2, 3] = value
        said = rf"{tmp_path / 'model.safetensors'}.*{name}.*found 1 of 144 that are NaN or infinite"
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(write(tmp_path, GPT2, tensors)).read(name)
    tensors["transformer.wte.weight"][:] = 3e38  # the sum is more than float32 holds
    tensors["transformer.wpe.weight"] = np.full((8, 6), 1e39)
    checkpoint = open_checkpoint(write(tmp_path, GPT2, tensors))
    assert (checkpoint.read("transformer.wte.weight") == np.float32(3e38)).all()
    with pytest.raises(CheckpointError, match="found 48 of 48 that are NaN or infinite"):
        checkpoint.read("transformer.wpe.weight")


def test_missing_files_are_named(tmp_path):
    none = r"expected a file, found"
    for name, content, said, hint in (
        ("", "", rf"config\.json: {none} none", ""),
        ("config.json", json.dumps(GPT2), r"expected weights in one of .* found none", ""),
        ("pytorch_model.bin", "", r"found pytorch_model\.bin", "pickle"),
        ("config.json", None, rf"{none} pytorch_model\.bin", "pickle"),
        ("model-Q8_0.gguf", "", rf"{none} model-Q8_0\.gguf", "tokenizer.json beside"),
    ):
        if content is None:
            (tmp_path / name).unlink()
        elif name:
            (tmp_path / name).write_text(content)
        with pytest.raises(CheckpointError, match=said) as caught:
            open_checkpoint(tmp_path)
        assert hint in str(caught.value.hint)


class Hub(QuietHandler):
    """A server with as much of the Hub's interface as a snapshot takes, and one repository, org/model."""

    commit = "0123456789abcdef0123456789abcdef01234567"
    files: dict[str, bytes] = {}  # noqa: RUF012
    fetched: list[str] = []  # noqa: RUF012

    def do_GET(self):
        start, _, name = self.path.partition(f"/org/model/resolve/{self.commit}/")
        digests = {file: sha256(content).hexdigest() for file, content in self.files.items()}
        if start.startswith("/api/models/org/model/tree/"):
            tree = [
                {"type": "file", "path": file, "size": len(self.files[file]), "oid": digest}
                for file, digest in digests.items()
            ]
            self.reply(200, json.dumps(tree).encode())
        elif start.startswith("/api/models/org/model/"):
            siblings = [{"rfilename": file} for file in self.files]
            found = {"id": "org/model", "sha": self.commit, "siblings": siblings}
            self.reply(200, json.dumps(found).encode())
        elif name in self.files:
            if self.command == "GET":
                self.fetched.append(name)
            tag = f'"{digests[name]}"'
            self.reply(200, self.files[name], ETag=tag, X_Repo_Commit=self.commit)
        else:
            is_gated = start.startswith("/api/models/org/gated/")
            code = "GatedRepo" if is_gated else "RepoNotFound"
            self.reply(403 if is_gated else 404, b"{}", X_Error_Code=code)

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    Hub.files, Hub.fetched = {"config.json": b"{}", "README.md": b"", "model.safetensors": b"1"}, []
    with serving(Hub) as host:
        files = f"http://{host}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", f"http://{host}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield Hub


def test_a_source_is_beside_the_manifest_or_refused(tmp_path):
    (tmp_path / "demo-model").mkdir()
    assert resolve_source("demo-model", tmp_path) == tmp_path / "demo-model"
    assert resolve_source(str(tmp_path), Path("elsewhere")) == tmp_path
    for source in ("nowhere", "hf://", "hf://name", "hf://a/b/c", "hf://org/name@"):
        with pytest.raises(ManifestError, match=r"model\.source: expected"):
            resolve_source(source, tmp_path)


def test_a_snapshot_holds_one_format_and_then_needs_no_network(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

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
    for name, said in (("other", "has no such repository"), ("gated", "does not let this account")):
        with pytest.raises(CheckpointError, match=rf"hf://org/{name}: .* {said}"):
            resolve_source(f"hf://org/{name}", tmp_path)
    hub.fetched.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_source("hf://org/model", tmp_path) == directory
    assert not hub.fetched
    with pytest.raises(NetworkError, match=r"hf://org/other: .*HF_HUB_OFFLINE is set") as caught:
        resolve_source("hf://org/other", tmp_path)
    assert "hf download org/other --local-dir DIR" in str(caught.value.hint)


LAYER = {"w": np.ones((2, 3), np.float32), "steps": np.arange(3)}
NESTED = {"layer": LAYER, "scale": np.float32(2)}
FLAT = {f"layer.{name}": leaf for name, leaf in LAYER.items()} | {"scale": NESTED["scale"]}


def assert_equal(read, expected):
    assert sorted(read) == sorted(expected)
    for name, values in expected.items():
        assert isinstance(read[name], np.ndarray)
        assert read[name].dtype == values.dtype
        assert np.array_equal(read[name], values)


def test_parameters_keep_their_types_and_have_known_formats(tmp_path):
    tensors = {"layer.w": np.ones((2, 3), ml_dtypes.bfloat16), "layer.steps": np.arange(3)}
    save_file(tensors, tmp_path / "p.safetensors")
    assert_equal(read_parameters(tmp_path / "p.safetensors"), tensors)
    (tmp_path / "params.npz").touch()
    for name in ("nothing", "params.npz"):
        with pytest.raises(CheckpointError, match=r"expected a \.safetensors file or an orbax"):
            read_parameters(tmp_path / name)


def test_parameters_from_orbax(tmp_path):
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
    expected = {"kernel": np.asarray(linear.kernel[...]), "bias": np.zeros(3, np.float32)}
    assert_equal(read_parameters(tmp_path / "nnx"), expected)
    with pytest.raises(CheckpointError, match="_METADATA") as caught:
        read_parameters(tmp_path / "manager")
    assert str(tmp_path / "manager" / "7") in str(caught.value.hint)
    damaged = tmp_path / "pytree"
    (damaged / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match=re.escape(f"{damaged}: orbax cannot restore")):
        read_parameters(damaged)
