"""Read how a model scores texts: the activation of its scores, its answers and the text of a pair.

The text is a chat template rendered at build time, or a template of the manifest. A bundle holds its pieces,
so a server needs no template engine to score a pair.

Causal models that score are given their pairs so (sentence-transformers 6, base/modality.py,
pair_to_messages): a message of the role `query`, one of the role `document`, and before them the instruction
as one of the role `system`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prejit.compiler.base.json_file import read_object
from prejit.compiler.base.suggestions import shown
from prejit.compiler.manifest.manifest import AnswersTable
from prejit.compiler.models.chat_files import read_chat
from prejit.compiler.models.families.layout_settings import LAYOUT, expect, known_keys
from prejit.runtime.errors import CheckpointError, PrejitError

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


_MARKS = {name: f"\ue000{name}\ue001" for name in ("instruction", "query", "document")}
_MARK = re.compile("\ue000([a-z]+)\ue001")
_OTHERS = {"instruction": " an <i>\n", "query": "\té 'q' & {0} ", "document": " \nd\\ <|d|> "}
"""Texts that a template which does more than to insert texts would change."""


@dataclass(frozen=True)
class PairTemplate:
    """A text with places for others.

    Attributes:
        pieces: literal texts, and between each two of them `instruction`, `query` or `document`.
        instruction: the instruction of calls that give none; None: there is no place for one.
    """

    pieces: tuple[str, ...]
    instruction: str | None

    def filled(self, texts: Mapping[str, str]) -> str:
        """Return the text of a pair."""
        return "".join(texts[each] if place % 2 else each for place, each in enumerate(self.pieces))


def of_text(template: str, instruction: str | None, where: str) -> PairTemplate:
    """Return the template of a manifest, with `{query}`, `{document}` and maybe `{instruction}`.

    Raises:
        CheckpointError: a place is missing, or the instruction of calls that give none.
    """
    pieces = tuple(re.split(r"\{(instruction|query|document)\}", template))
    _check_places(pieces, f"{where}.template", template)
    has_place = "instruction" in pieces[1::2]
    if has_place != (instruction is not None):
        wanted = "expected a text" if has_place else "expected none: template has no {instruction}"
        raise CheckpointError(f"{where}.instruction: {wanted}, found {shown(instruction)}")
    return PairTemplate(pieces, instruction)


def of_chat(
    directory: Path, form: str, variables: Mapping[str, Any], instruction: str | None
) -> PairTemplate:
    """Return the chat template of a directory as a template of pairs.

    Args:
        directory: the tokenizer's.
        form: `flat` if the content of a message is its text, `structured` if it is a list of parts.
        variables: of the template, such as `add_generation_prompt`.
        instruction: of calls that give none; None: that of the template.

    Raises:
        CheckpointError: there is no template, it does not take these roles, or it changes texts.
    """
    chat = read_chat(directory)
    if chat is None:
        raise CheckpointError(
            f"{directory}: expected a chat template for messages of the roles query and document, found none",
            hint=_HINT,
        )
    from prejit.runtime.text.chat_template import ChatTemplates

    engine, given = ChatTemplates(chat, str(directory)), dict(variables)
    begins = bool(given.pop("add_generation_prompt", False))

    def rendered(texts: Mapping[str, str], system: str | None) -> str:
        roles = [("system", system)] if system else []
        messages = [
            {"role": role, "content": text if form == "flat" else [{"type": "text", "text": text}]}
            for role, text in (*roles, *((role, texts[role]) for role in ("query", "document")))
        ]
        try:
            return engine.render(messages, add_generation_prompt=begins, variables=given)
        except PrejitError as error:
            raise CheckpointError(f"{directory}: {error}", hint=_HINT) from error

    pieces, fixed = _split(rendered(_MARKS, _MARKS["instruction"])), instruction
    if instruction is None:
        bare = rendered(_MARKS, None)
        instruction = _instruction_of(bare, pieces)
        pieces = _split(bare) if instruction is None else pieces
    elif "instruction" not in pieces[1::2]:
        pieces, instruction = _split(rendered(_MARKS, fixed)), None
    _check_places(pieces, f"{directory}: chat template", "")
    template = PairTemplate(pieces, instruction)
    system = fixed if instruction is None else _OTHERS["instruction"]
    if template.filled(_OTHERS) != rendered(_OTHERS, system):
        raise CheckpointError(
            f"{directory}: chat template: expected one that inserts the texts of a query and a document as "
            "they are, found one that changes them",
            hint=_HINT,
        )
    return template


_HINT = "give the manifest a template: [encode.answers] with yes, no and template"


def _split(text: str) -> tuple[str, ...]:
    return tuple(_MARK.split(text))


def _instruction_of(bare: str, pieces: Sequence[str]) -> str | None:
    """Return what stands in the place of the instruction without one; None: texts differ elsewhere too."""
    pattern, seen = "", False
    for place, each in enumerate(pieces):
        if place % 2 == 0:
            pattern += re.escape(each)
        elif each == "instruction":
            pattern += "(?P=instruction)" if seen else "(?P<instruction>.*?)"
            seen = True
        else:
            pattern += re.escape(_MARKS[each])
    found = re.fullmatch(pattern, bare, re.DOTALL)
    return found["instruction"] if seen and found else None


def _check_places(pieces: Sequence[str], where: str, found: str) -> None:
    missing = [name for name in ("query", "document") if name not in pieces[1::2]]
    if missing:
        places = " and ".join(f"{{{name}}}" for name in missing)
        raise CheckpointError(
            f"{where}: expected a place for {places}, found none{f' in {shown(found)}' if found else ''}",
            hint=_HINT,
        )
