"""Read how a model scores texts: the activation of its scores, its answers and the text of a pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prejit.compiler.base.json_file import read_object
from prejit.compiler.base.suggestions import shown
from prejit.compiler.manifest.manifest import AnswersTable
from prejit.compiler.models.families.layout_settings import LAYOUT, expect, known_keys
from prejit.compiler.models.families.pair_template import PairTemplate, of_chat, of_text
from prejit.runtime.errors import CheckpointError

IDENTITY, SIGMOID = "identity", "sigmoid"
"""Activations of scores."""

_SCORE_ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": IDENTITY,
    "torch.nn.modules.activation.Sigmoid": SIGMOID,
}


@dataclass(frozen=True)
class Answers:
    """The tokens whose logits are the score of a pair, as ids or as texts of a manifest.

    Attributes:
        yes: the token of relevant documents.
        no: the token whose logit is subtracted; None: none is.
        where: the file, or the place in the manifest, for errors.
    """

    yes: int | str
    no: int | str | None
    where: str


def read_answers(directory: Path) -> Answers:
    """Return the answers of a module LogitScore.

    Raises:
        CheckpointError: as `sentence_layout.read_layout`.
    """
    file = directory / "config.json"
    settings = read_object(file, LAYOUT)
    known_keys(file, settings, ("true_token_id", "false_token_id", "module_input_name"))
    expect(file, settings, "module_input_name", ["causal_logits"])
    yes, no = settings.get("true_token_id"), settings.get("false_token_id")
    if type(yes) is not int or type(no) not in (int, type(None)):
        raise CheckpointError(
            f"{file}: true_token_id, false_token_id: expected a token id, and a token id or null; found "
            f"{shown(yes)}, {shown(no)}"
        )
    return Answers(yes, no, str(file))


def template_of(table: AnswersTable, transformer: Path) -> PairTemplate:
    """Return the template of a manifest, or else the chat template of the directory."""
    if table.template is None:
        return of_chat(transformer, "flat", {}, table.instruction)
    return of_text(table.template, table.instruction, "manifest: encode.answers")


def message_form(transformer: Path) -> tuple[str, Mapping[str, Any]] | None:
    """Return how a model that scores takes messages, with variables of its template; None: it takes none."""
    file = transformer / "sentence_bert_config.json"
    settings = read_object(file, LAYOUT, required=False)
    message = (settings.get("modality_config") or {}).get("message")
    if message is None:
        return None
    return message["format"], (settings.get("processing_kwargs") or {}).get("chat_template", {})


def score_activation(
    own: Path, saved: Mapping[str, Any], file: Path, settings: Mapping[str, Any]
) -> str | None:
    """Return the activation of a cross-encoder's scores, from the first file and key that has one."""
    older = settings.get("sentence_transformers")
    older = older if isinstance(older, dict) else {}
    found: list[tuple[Path, str, Any]] = [
        (own, "activation_fn", saved.get("activation_fn")),
        (file, "sentence_transformers.activation_fn", older.get("activation_fn")),
        (
            file,
            "sbert_ce_default_activation_function",
            settings.get("sbert_ce_default_activation_function"),
        ),
    ]
    for path, key, value in found:
        if value is not None:
            expect(path, {key: value}, key, _SCORE_ACTIVATIONS)
            return _SCORE_ACTIVATIONS[value]
    return None
