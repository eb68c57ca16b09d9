"""Read the sentence-transformers layout: the modules that make an embedding from hidden states. No JAX.

    modules.json                 the modules in order, each with its type and its directory
    sentence_bert_config.json    max_seq_length, in the transformer's directory; old files name other models
    config.json, ...             the transformer, in the directory itself or in 0_Transformer
    1_Pooling/config.json        pooling modes
    2_Dense/config.json          a linear layer with an activation; its weights beside it
    2_Normalize                  empty
    1_LogitScore/config.json     the tokens whose logits are a score, behind a causal language model
    config_sentence_transformers.json   prompts; of a cross-encoder the activation of scores
    sparse_linear.pt             BGE-M3: hidden state to a number; its positive part weighs the token
    colbert_linear.pt            BGE-M3: hidden state to a vector, of length 1 then

BGE-M3's heads of tokens (Chen et al. 2024, arXiv 2402.03216, section 3) are computed as FlagEmbedding does it
(inference/embedder/encoder_only/m3.py).

A directory without modules.json gets mean pooling and no normalization, or the last token of a model of the
class ...ForCausalLM, as in sentence-transformers (sentence_transformer/model.py, _load_default_modules). The
class ...ForSequenceClassification gives scores: a cross-encoder, whose layout is config.json alone, or one
module Transformer (cross_encoder/model.py). A causal language model scores by the logits of answers such as
"yes" and "no" behind a pair: as the modules Transformer and LogitScore say, or the manifest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prejit.compiler.base.json_file import read_list, read_object
from prejit.compiler.base.suggestions import shown
from prejit.compiler.manifest.manifest import Encode
from prejit.compiler.models.chat_files import special_tokens
from prejit.compiler.models.families.layout_settings import HINT, LAYOUT, expect, known_keys
from prejit.compiler.models.families.score_layout import (
    Answers,
    PairTemplate,
    message_form,
    of_chat,
    read_answers,
    score_activation,
    template_of,
)
from prejit.compiler.models.torch_tensors import torch_tensors
from prejit.runtime.errors import CheckpointError

POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of a pooling config with their modes, in the order in which results are concatenated. A list
`pooling_mode` has an order of its own."""

ACTIVATIONS = (
    "torch.nn.modules.linear.Identity",
    "torch.nn.modules.activation.Tanh",
    "torch.nn.modules.activation.ReLU",
    "torch.nn.modules.activation.GELU",
    "torch.nn.modules.activation.SiLU",
    "torch.nn.modules.activation.Sigmoid",
)
"""Supported activations of a dense layer."""

_MODULES = ("Transformer", "Pooling", "Dense", "Dropout", "Normalize", "LogitScore")
_WITH_FILES = ("Transformer", "Pooling", "Dense", "LogitScore")
"""The modules whose directories hold files: that of Normalize is empty, and often not copied."""
_TRANSFORMERS = ("Transformer", "BERT", "RoBERTa", "DistilBERT")
"""Names of the first module; files from before 2020 have the last three."""
_WIDTHS = ("word_embedding_dimension", "embedding_dimension")
_WIDEST = 2**20
"""Maximum width of a dense layer."""
_UNLIMITED = 10**9
"""transformers writes a larger model_max_length where there is no limit."""
_WITH_SEGMENTS = ("Bert", "Deberta", "Electra")
"""How the names of transformers' classes of tokenizers begin that return token_type_ids."""
_EMBEDS = ("feature-extraction", "token_embeddings", "last_hidden_state")
_SCORES = ("sequence-classification", "scores", "logits")
_ANSWERS = ("text-generation", "causal_logits", "logits")
"""Tasks of a transformer, each with the names of its output, in sentence-transformers and in transformers."""
_SETTINGS = "config_sentence_transformers.json"
_TOKEN_HEADS = {"multi_vector": "colbert_linear", "sparse": "sparse_linear"}
"""The name of the file of each head of tokens, and of its layer, in the order of a program's results."""
_UNWEIGHTED = ("cls_token", "eos_token", "pad_token", "unk_token")
"""The special tokens that the sparse head gives no weight."""
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""The models that may be in the name of the transformer's settings, in the order of the reference."""


@dataclass(frozen=True)
class DenseModule:
    """A linear layer with an activation."""

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
        directory: the model's directory.
        transformer: directory of the transformer and its tokenizer.
        pooling: modes whose results are concatenated.
        width: width that pooling expects from the transformer; None if no file has it.
        dense: linear layers that follow pooling.
        normalized: whether embeddings are normalized to length 1 at the end.
        max_tokens: maximum tokens of a sentence; None if no file has it.
        scores: whether the model scores texts: it has a head, and no pooling.
        score_activation: IDENTITY or SIGMOID; None if no file has it.
        has_segments: whether its tokenizer tells the tokens of a pair of texts apart; None if no file says.
        prompts: texts to put before sentences, by name.
        default_prompt: the name of the prompt of calls that name none; None: there is none.
        answers: the tokens that score; None: the model embeds, or has a head of its own.
        template: the text of a pair; None: a pair is as its tokenizer makes it.
        heads: those of tokens that a manifest asks for.
        unweighted: tokens without a weight of their own, such as [CLS]; None: no head weighs tokens.
        files: the JSON files that decide all this, in a fixed order.
    """

    directory: Path
    transformer: Path
    pooling: tuple[str, ...]
    width: int | None
    dense: tuple[DenseModule, ...]
    normalized: bool
    max_tokens: int | None
    scores: bool
    score_activation: str | None
    has_segments: bool | None
    prompts: Mapping[str, str]
    default_prompt: str | None
    answers: Answers | None
    template: PairTemplate | None
    heads: tuple[TokenHead, ...]
    unweighted: tuple[int, ...] | None
    files: tuple[Path, ...]


def read_layout(directory: Path, encode: Encode | None = None) -> SentenceLayout:
    """Read a sentence-transformers directory, or a plain directory of a model.

    `encode` is the section of the manifest, which may say how a causal language model scores.

    Raises:
        CheckpointError: a module or setting is not supported, or a file cannot be read; the error names
            file, key, value and what is allowed.
    """
    file = directory / "modules.json"
    is_plain = not file.is_file()
    modules = [("Transformer", directory)] if is_plain else list(_modules(file))
    kinds = [kind for kind, _ in modules]
    transformer = modules[0][1] if modules else directory
    settings = read_object(transformer / "config.json", LAYOUT, required=False)
    classes = settings.get("architectures")
    kind = str(classes[0]) if isinstance(classes, list) and classes else ""
    causal = kind.endswith("ForCausalLM")
    table = None if encode is None else encode.answers
    if table is not None and not (is_plain and causal):
        raise CheckpointError(
            f"{transformer / 'config.json'}: expected a plain directory of a model ...ForCausalLM for "
            f"[encode.answers], found {kind or 'no class'}{'' if is_plain else ' with ' + file.name}",
            hint="leave [encode.answers] out of the manifest: this directory says what it computes",
        )
    has_answers = kinds == ["Transformer", "LogitScore"] and causal
    answers = read_answers(modules[1][1]) if has_answers else None
    if table is not None:
        answers = Answers(table.yes, table.no, "manifest: encode.answers")
    scores = answers is not None or (
        kinds == ["Transformer"] and kind.endswith("ForSequenceClassification")
    )
    _check_modules(file, modules, has_any_order=is_plain or scores)
    modes: tuple[str, ...] = ("lasttoken" if causal else "mean",)
    width, files = None, [*([] if is_plain else [file])]
    files += _present(transformer, "config.json", "tokenizer_config.json")
    tokenizer = transformer / "tokenizer_config.json"
    of_tokenizer = read_object(tokenizer, LAYOUT, required=False)
    # A bundle cuts off the end of a text that is too long.
    expect(tokenizer, of_tokenizer, "truncation_side", ["right", None])
    if has_answers:
        files.append(modules[1][1] / "config.json")
    if is_plain:
        limit = _model_max_length(of_tokenizer)
    else:
        task = _EMBEDS
        if scores:
            task = _ANSWERS if answers else _SCORES
        limit = _max_seq_length(transformer, task, of_tokenizer)
        files += _present(transformer, transformer_settings(transformer).name)
    if "Pooling" in kinds:
        modes, width = _pooling(modules[1][1] / "config.json")
        files.append(modules[1][1] / "config.json")
    dense = tuple(_dense(path) for kind, path in modules if kind == "Dense")
    own = directory / _SETTINGS
    # Without modules.json the reference does not read its own settings.
    saved = {} if is_plain else read_object(own, LAYOUT, required=False)
    activation = (
        score_activation(own, saved, transformer / "config.json", settings) if scores else None
    )
    form = message_form(transformer) if scores and not is_plain else None
    prompts, default = _prompts(own, saved, modules, scores=scores and form is None)
    template = None
    if table is not None:
        template = template_of(table, transformer)
    elif form is not None:
        template = of_chat(transformer, *form, prompts[default] if default else None)
    if template is not None:
        files += _present(transformer, "chat_template.jinja", "chat_template.json")
        more = transformer / "additional_chat_templates"
        files += sorted(more.glob("*.jinja"))
    heads, unweighted = token_heads(directory, transformer, encode.heads if encode else ())
    if heads and scores:
        raise CheckpointError(
            f"{file}: expected a model that embeds for heads = [...] in [encode], found {kind}"
        )
    files += [each.file for each in heads]
    # It gives the ids of the manifest's answers, and of tokens without a weight.
    if table is not None or unweighted is not None:
        files += _present(transformer, "tokenizer.json")
    return SentenceLayout(
        directory,
        transformer,
        modes,
        width,
        dense,
        "Normalize" in kinds,
        limit,
        scores,
        activation,
        _has_segments(of_tokenizer),
        {} if scores else prompts,
        None if scores else default,
        answers,
        template,
        heads,
        unweighted,
        (
            *files,
            *(part.directory / "config.json" for part in dense),
            *([] if is_plain else _present(directory, _SETTINGS)),
        ),
    )


def _check_modules(file: Path, modules: Sequence[tuple[str, Path]], *, has_any_order: bool) -> None:
    """Check that modules come in an order that is supported, each with its directory beside modules.json."""
    kinds = [kind for kind, _ in modules]
    if not has_any_order and (
        kinds[:2] != ["Transformer", "Pooling"]
        or kinds.count("Normalize") > (kinds[-1] == "Normalize")
    ):
        raise CheckpointError(
            f"{file}: expected Transformer, Pooling, then Dense layers, then at most Normalize; or one "
            "Transformer of the class ...ForSequenceClassification; or Transformer of the class "
            f"...ForCausalLM and LogitScore; found {', '.join(kinds) or 'none'}",
            hint=HINT,
        )
    directory = file.parent
    for name, path in modules:
        if name not in _WITH_FILES or (
            path.is_dir() and (name == "Transformer" or path != directory)
        ):
            continue
        found = "" if path == directory else path.name
        raise CheckpointError(
            f"{file}: path of the module {name}: expected a directory beside it, found {shown(found)}",
            hint="correct path, or take the directory that was published with modules.json",
        )


def _modules(file: Path) -> Iterator[tuple[str, Path]]:
    """Yield the kind of each module, the last part of its type, and its directory."""
    listed = read_list(file, LAYOUT)
    for place, module in enumerate(listed):
        kind, path = (
            (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        )
        name = kind.rpartition(".")[2] if isinstance(kind, str) else ""
        name = "Transformer" if place == 0 and name in _TRANSFORMERS else name
        if name not in _MODULES or not str(kind).startswith("sentence_transformers."):
            allowed = ", ".join(f'"sentence_transformers.models.{known}"' for known in _MODULES)
            raise CheckpointError(
                f"{file}: [{place}].type: expected one of {allowed}; found {shown(kind)}", hint=HINT
            )
        parts = Path(path).parts if isinstance(path, str) else ("..",)
        if ".." in parts or Path(*parts).is_absolute() or len(parts) > 1:
            raise CheckpointError(
                f"{file}: [{place}].path: expected the name of a directory beside it, found {shown(path)}"
            )
        if name != "Dropout":  # Dropout does nothing at inference
            yield name, file.parent / str(path)


def _pooling(file: Path) -> tuple[tuple[str, ...], int | None]:
    """Return the modes, and the width that pooling expects."""
    settings = read_object(file, LAYOUT)
    known_keys(file, settings, (*POOLING_KEYS, *_WIDTHS, "pooling_mode", "include_prompt"))
    # include_prompt concerns tokens of a prompt before the sentence: see _prompts.
    for key in (*POOLING_KEYS, "include_prompt"):
        expect(file, settings, key, [True, False])
    if "pooling_mode" not in settings:
        settings.setdefault("pooling_mode_mean_tokens", True)  # the default of the reference
    modes = tuple(mode for key, mode in POOLING_KEYS.items() if settings.get(key))
    if (named := settings.get("pooling_mode")) is not None:
        every = tuple(POOLING_KEYS.values())
        chosen = [named] if isinstance(named, str) else named
        for mode in chosen if isinstance(chosen, list) else [chosen]:
            if mode not in every:
                expect(file, {"pooling_mode": mode}, "pooling_mode", every)
        if len(set(chosen)) < len(chosen):
            raise CheckpointError(
                f"{file}: pooling_mode: expected each mode once, found {shown(chosen)}", hint=HINT
            )
        modes = tuple(chosen)  # results are concatenated in the order of the file
    if not modes:
        raise CheckpointError(
            f"{file}: expected one of {', '.join(POOLING_KEYS)} to be true, found none", hint=HINT
        )
    width = next((settings[key] for key in _WIDTHS if type(settings.get(key)) is int), None)
    return modes, width


def _dense(directory: Path) -> DenseModule:
    file = directory / "config.json"
    settings = read_object(file, LAYOUT)
    names = ("in_features", "out_features", "bias", "activation_function")
    known_keys(file, settings, (*names, "module_input_name", "module_output_name", "use_residual"))
    expect(file, settings, "use_residual", [False])
    for key in ("module_input_name", "module_output_name"):
        expect(file, settings, key, ["sentence_embedding", None])
    expect(file, settings, "bias", [True, False])
    settings.setdefault("activation_function", "torch.nn.modules.activation.Tanh")
    expect(file, settings, "activation_function", ACTIVATIONS)
    for key in names[:2]:
        if type(settings.get(key)) is not int or not 0 < settings[key] <= _WIDEST:
            raise CheckpointError(
                f"{file}: {key}: expected an integer from 1 to {_WIDEST}, found {shown(settings.get(key))}"
            )
    return DenseModule(
        directory.name,
        settings["in_features"],
        settings["out_features"],
        settings.get("bias", True),
        settings["activation_function"],
        directory,
    )


def transformer_settings(transformer: Path) -> Path:
    """Return the first file of settings that is not empty, as the reference; or its name of today."""
    files = [transformer / f"sentence_{kind}_config.json" for kind in _KINDS]
    return next((file for file in files if read_object(file, LAYOUT, required=False)), files[0])


def _max_seq_length(
    transformer: Path, task: tuple[str, str, str], of_tokenizer: Mapping[str, Any]
) -> int | None:
    """Return the limit of the transformer's settings, or else the tokenizer's; check the others."""
    file = transformer_settings(transformer)
    settings = read_object(file, LAYOUT, required=False)
    name, output, method_output = task
    text = {"method": "forward", "method_output_name": method_output}
    kinds: list[Any] = [{"text": text}, None]
    variables: list[Any] = [{}, None]
    if task != _EMBEDS:
        kinds += [
            {"text": text, "message": {**text, "format": form}} for form in ("flat", "structured")
        ]
        given = settings.get("processing_kwargs")
        if isinstance(given, dict) and isinstance(given.get("chat_template"), dict):
            variables.append({"chat_template": given["chat_template"]})
    defaults: dict[str, list[Any]] = {
        "do_lower_case": [False],
        "transformer_task": [name],
        "module_output_name": [output],
        "unpad_inputs": [False, None],
        "processing_kwargs": variables,
        "modality_config": kinds,
    }
    known_keys(file, settings, ("max_seq_length", *defaults))
    for key, allowed in defaults.items():
        expect(file, settings, key, allowed)
    limit = settings.get("max_seq_length")
    if limit is None:
        return _model_max_length(of_tokenizer)
    if type(limit) is not int or limit < 1:
        raise CheckpointError(
            f"{file}: max_seq_length: expected a positive integer or null, found {shown(limit)}"
        )
    return limit


def _model_max_length(settings: Mapping[str, Any]) -> int | None:
    limit = settings.get("model_max_length", settings.get("max_len"))  # as old files name it
    return limit if type(limit) is int and 0 < limit < _UNLIMITED else None


def _prompts(
    file: Path, settings: Mapping[str, Any], modules: Sequence[tuple[str, Path]], *, scores: bool
) -> tuple[Mapping[str, str], str | None]:
    """Return the prompts and the default one's name; refuse truncation, which a bundle does not apply."""
    expect(file, settings, "truncate_dim", [None])
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise CheckpointError(
            f"{file}: prompts: expected an object of texts, found {shown(prompts)}", hint=HINT
        )
    expect(file, settings, "default_prompt_name", [None, *(() if scores else prompts)])
    if any(prompts.values()) and len(modules) > 1:
        # Then the tokens of a prompt take no part in pooling, which a bundle does not do.
        pooling = modules[1][1] / "config.json"
        expect(pooling, read_object(pooling, LAYOUT), "include_prompt", [True])
    return prompts, default


def _has_segments(settings: Mapping[str, Any]) -> bool | None:
    names, kind = settings.get("model_input_names"), settings.get("tokenizer_class")
    if isinstance(names, list):
        return "token_type_ids" in names
    return None if kind is None else str(kind).startswith(_WITH_SEGMENTS)


def _present(directory: Path, *names: str) -> list[Path]:
    return [directory / name for name in names if (directory / name).is_file()]


@dataclass(frozen=True)
class TokenHead:
    """A linear layer on the hidden state of each token."""

    kind: str
    outputs: int
    file: Path

    @property
    def name(self) -> str:
        """The name of the layer."""
        return _TOKEN_HEADS[self.kind]


def token_heads(
    directory: Path, tokenizer: Path, asked: Collection[str]
) -> tuple[tuple[TokenHead, ...], tuple[int, ...] | None]:
    """Return the heads of a directory that are asked for, and the tokens that get no weight.

    `tokenizer` is the directory of its tokenizer. None in place of tokens: no head weighs any.

    Raises:
        CheckpointError: a file is missing or has other tensors.
    """
    heads = []
    for kind, name in _TOKEN_HEADS.items():
        if kind not in asked:
            continue
        file = directory / f"{name}.pt"
        tensors = torch_tensors(file)
        matrix = tensors.get("weight")
        if tensors.keys() != {"weight", "bias"} or matrix is None or len(matrix.shape) != 2:
            raise CheckpointError(
                f"{file}: expected the tensors weight [outputs, inputs] and bias [outputs], found "
                f"{', '.join(f'{at} {list(each.shape)}' for at, each in tensors.items()) or 'none'}"
            )
        if kind == "sparse" and matrix.shape[0] != 1:
            raise CheckpointError(f"{file}: weight: expected one output, found {matrix.shape[0]}")
        heads.append(TokenHead(kind, matrix.shape[0], file))
    return tuple(heads), _unweighted(tokenizer) if "sparse" in asked else None


def _unweighted(directory: Path) -> tuple[int, ...]:
    from tokenizers import Tokenizer

    named = special_tokens(directory)
    if "cls_token" not in named:  # transformers would take that of the tokenizer's class
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: expected cls_token and the other special tokens, which "
            "get no weight; found none",
            hint="save the tokenizer again with a newer transformers: tokenizer.save_pretrained(DIRECTORY)",
        )
    file = directory / "tokenizer.json"
    try:
        ids = Tokenizer.from_file(str(file)).token_to_id
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{file}: expected a tokenizer: {error}") from error
    found = {ids(named[name]) for name in _UNWEIGHTED if name in named}
    return tuple(sorted(each for each in found if each is not None))
