"""The sentence-transformers layout: which modules make an embedding of a transformer's hidden states. No JAX.

    modules.json                 the modules in order, each with its type and its directory
    sentence_bert_config.json    max_seq_length, in the transformer's directory
    config.json, ...             the transformer, in the directory itself or in 0_Transformer
    1_Pooling/config.json        pooling modes
    2_Dense/config.json          a linear layer with an activation; its weights beside it
    2_Normalize                  nothing in it

A directory without modules.json gets mean pooling and no normalisation, which is what sentence-transformers
makes of one (sentence_transformers/SentenceTransformer.py, _load_auto_model).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prejit.compiler.base.json_file import read_list, read_object
from prejit.compiler.base.wording import did_you_mean, shown
from prejit.runtime.errors import CheckpointError

POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of a pooling config with their modes, in the order in which several are put side by side."""

ACTIVATIONS = (
    "torch.nn.modules.linear.Identity",
    "torch.nn.modules.activation.Tanh",
    "torch.nn.modules.activation.ReLU",
    "torch.nn.modules.activation.GELU",
    "torch.nn.modules.activation.SiLU",
    "torch.nn.modules.activation.Sigmoid",
)
"""Of a dense layer."""

_MODULES = ("Transformer", "Pooling", "Dense", "Dropout", "Normalize")
_TRANSFORMERS = ("Transformer", "BERT", "RoBERTa", "DistilBERT")
"""The last three in files of before 2020."""
_WIDTHS = ("word_embedding_dimension", "embedding_dimension")
_WIDEST = 2**20
"""Largest width of a dense layer."""
_UNLIMITED = 10**9
"""A model_max_length of transformers that says nothing is larger."""
_LAYOUT = "expected a directory in the sentence-transformers layout"
_HINT = "write the model as a JAX function or flax module and compile it as a [[program]]"


@dataclass(frozen=True)
class DenseModule:
    """A linear layer with an activation.

    Attributes:
        name: of its directory: `2_Dense`.
        inputs, outputs: widths.
        bias: whether it has one.
        activation: as torch names it, one of ACTIVATIONS.
        directory: with its weights.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool
    activation: str
    directory: Path


@dataclass(frozen=True)
class SentenceLayout:
    """A published encoder's modules.

    Attributes:
        directory: of all of it.
        transformer: directory of the transformer and its tokenizer.
        pooling: modes, side by side.
        width: that pooling expects of the transformer; None: no file says.
        dense: linear layers behind pooling.
        normalized: whether embeddings are given length 1 at the end.
        max_tokens: of a sentence; None: no file says.
        files: JSON files that decide all this, in a fixed order.
    """

    directory: Path
    transformer: Path
    pooling: tuple[str, ...]
    width: int | None
    dense: tuple[DenseModule, ...]
    normalized: bool
    max_tokens: int | None
    files: tuple[Path, ...]


def read_layout(directory: Path) -> SentenceLayout:
    """Reads a sentence-transformers directory, or a plain directory of a model.

    Raises:
        CheckpointError: a module or a setting that is not built here, or a file that cannot be read; names
            file, key, value and what is allowed.
    """
    file = directory / "modules.json"
    if not file.is_file():
        files = tuple(_present(directory, "config.json", "tokenizer_config.json"))
        limit = _model_max_length(directory)
        return SentenceLayout(directory, directory, ("mean",), None, (), False, limit, files)
    modules = list(_modules(file))
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds.count("Normalize") > (
        kinds[-1] == "Normalize"
    ):
        raise CheckpointError(
            f"{file}: expected Transformer, Pooling, then Dense layers, then at most Normalize; found "
            f"{', '.join(kinds) or 'none'}",
            hint=_HINT,
        )
    transformer, pooling = modules[0][1], modules[1][1]
    modes, width = _pooling(pooling / "config.json")
    dense = tuple(_dense(path) for kind, path in modules if kind == "Dense")
    _check_prompts(directory / "config_sentence_transformers.json")
    return SentenceLayout(
        directory,
        transformer,
        modes,
        width,
        dense,
        "Normalize" in kinds,
        _max_seq_length(transformer),
        (
            file,
            *_present(transformer, "config.json", "tokenizer_config.json"),
            *_present(transformer, "sentence_bert_config.json"),
            pooling / "config.json",
            *(part.directory / "config.json" for part in dense),
        ),
    )


def _modules(file: Path) -> Iterator[tuple[str, Path]]:
    """What each module is, by its last name, and its directory."""
    listed = read_list(file, _LAYOUT)
    for place, module in enumerate(listed):
        kind, path = (
            (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        )
        name = kind.rpartition(".")[2] if isinstance(kind, str) else ""
        name = "Transformer" if place == 0 and name in _TRANSFORMERS else name
        if name not in _MODULES or not str(kind).startswith("sentence_transformers."):
            allowed = ", ".join(f'"sentence_transformers.models.{known}"' for known in _MODULES)
            raise CheckpointError(
                f"{file}: [{place}].type: expected one of {allowed}; found {shown(kind)}",
                hint=_HINT,
            )
        parts = Path(path).parts if isinstance(path, str) else ("..",)
        if ".." in parts or Path(*parts).is_absolute() or len(parts) > 1:
            raise CheckpointError(
                f"{file}: [{place}].path: expected the name of a directory beside it, found {shown(path)}"
            )
        if name != "Dropout":  # which does nothing where nothing is trained
            yield name, file.parent / str(path)


def _pooling(file: Path) -> tuple[tuple[str, ...], int | None]:
    """The modes, and the width that is expected."""
    said = read_object(file, _LAYOUT)
    _known_keys(file, said, (*POOLING_KEYS, *_WIDTHS, "pooling_mode", "include_prompt"))
    # include_prompt decides which tokens count where a prompt was put before the sentence: none is here.
    for key in (*POOLING_KEYS, "include_prompt"):
        _expect(file, said, key, [True, False])
    if "pooling_mode" not in said:
        said.setdefault("pooling_mode_mean_tokens", True)  # as the reference's constructor has it
    modes = tuple(mode for key, mode in POOLING_KEYS.items() if said.get(key))
    if (named := said.get("pooling_mode")) is not None:
        every = tuple(POOLING_KEYS.values())
        chosen = [named] if isinstance(named, str) else named
        for mode in chosen if isinstance(chosen, list) else [chosen]:
            if mode not in every:
                _expect(file, {"pooling_mode": mode}, "pooling_mode", every)
        modes = tuple(mode for mode in every if mode in chosen)
    if not modes:
        raise CheckpointError(
            f"{file}: expected one of {', '.join(POOLING_KEYS)} to be true, found none", hint=_HINT
        )
    width = next((said[key] for key in _WIDTHS if type(said.get(key)) is int), None)
    return modes, width


def _dense(directory: Path) -> DenseModule:
    file = directory / "config.json"
    said = read_object(file, _LAYOUT)
    names = ("in_features", "out_features", "bias", "activation_function")
    _known_keys(file, said, (*names, "module_input_name", "module_output_name"))
    for key in ("module_input_name", "module_output_name"):
        _expect(file, said, key, ["sentence_embedding", None])
    _expect(file, said, "bias", [True, False])
    said.setdefault("activation_function", "torch.nn.modules.activation.Tanh")
    _expect(file, said, "activation_function", ACTIVATIONS)
    for key in names[:2]:
        if type(said.get(key)) is not int or not 0 < said[key] <= _WIDEST:
            raise CheckpointError(
                f"{file}: {key}: expected an integer from 1 to {_WIDEST}, found {shown(said.get(key))}"
            )
    return DenseModule(
        directory.name,
        said["in_features"],
        said["out_features"],
        said.get("bias", True),
        said["activation_function"],
        directory,
    )


def _max_seq_length(transformer: Path) -> int | None:
    """Of sentence_bert_config.json, whose other settings are checked; else the tokenizer's."""
    file = transformer / "sentence_bert_config.json"
    said = read_object(file, _LAYOUT, required=False)
    defaults: dict[str, list[Any]] = {
        "do_lower_case": [False],
        "transformer_task": ["feature-extraction"],
        "module_output_name": ["token_embeddings"],
        "unpad_inputs": [False, None],
        "processing_kwargs": [{}, None],
        "modality_config": [
            {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            None,
        ],
    }
    _known_keys(file, said, ("max_seq_length", *defaults))
    for key, allowed in defaults.items():
        _expect(file, said, key, allowed)
    limit = said.get("max_seq_length")
    if limit is None:
        return _model_max_length(transformer)
    if type(limit) is not int or limit < 1:
        raise CheckpointError(
            f"{file}: max_seq_length: expected a positive integer or null, found {shown(limit)}"
        )
    return limit


def _model_max_length(directory: Path) -> int | None:
    file = directory / "tokenizer_config.json"
    said = read_object(file, _LAYOUT, required=False)
    limit = said.get("model_max_length")
    return limit if type(limit) is int and 0 < limit < _UNLIMITED else None


def _check_prompts(file: Path) -> None:
    """A prompt that is put before every sentence unasked would be missing here."""
    if file.is_file():
        said = read_object(file, _LAYOUT)
        _expect(file, said, "default_prompt_name", [None])
        _expect(file, said, "truncate_dim", [None])


def _present(directory: Path, *names: str) -> list[Path]:
    return [directory / name for name in names if (directory / name).is_file()]


def _known_keys(file: Path, said: Mapping[str, Any], known: Collection[str]) -> None:
    for key, value in said.items():
        if key not in known:
            raise CheckpointError(
                f"{file}: {key}: expected one of {', '.join(known)}; found {key} with {shown(value)}"
                f"{did_you_mean(key, known)}",
                hint=_HINT,
            )


def _expect(file: Path, said: Mapping[str, Any], key: str, allowed: Collection[Any]) -> None:
    # True is 1 in Python, and a setting that is 1 is not what was meant.
    if key in said and not any(
        said[key] == value and type(said[key]) is type(value) for value in allowed
    ):
        raise CheckpointError(
            f"{file}: {key}: expected {' or '.join(map(shown, allowed))}; found {shown(said[key])}",
            hint=_HINT,
        )
