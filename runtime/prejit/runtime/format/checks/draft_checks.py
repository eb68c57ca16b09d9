"""Checks of a draft model: it has programs of its own, the tokens of the decoder, and its contexts."""

from __future__ import annotations

from dataclasses import replace

from prejit.runtime.format.bundle_schema import Config
from prejit.runtime.format.checks.program_interfaces import is_rewindable
from prejit.runtime.format.names import DRAFT


def parted(config: Config) -> tuple[Config, Config]:
    """Return the table without its draft model, and that of the draft model, whose kinds are plain.

    Raises:
        ValueError: the draft model cannot guess for the decoder.
    """
    drafts = [each for each in config.programs if each.kind.startswith(DRAFT)]
    decoder, draft = config.decoder, config.draft
    if draft is None or decoder is None:
        missing = "draft" if draft is None else "decoder"
        raise ValueError(f"expected {missing!r} in the config of a draft model, found none")
    if config.mesh is not None:
        raise ValueError("draft: expected none beside a mesh")
    if draft.source is not None or draft.adapters is not None or not is_rewindable(draft):
        raise ValueError("draft: expected a decoder of prompts whose cache has positions alone")
    if draft.vocab_size != decoder.vocab_size:
        raise ValueError(
            f"draft: expected the {decoder.vocab_size} tokens of the decoder, found {draft.vocab_size}"
        )
    kinds = {each.kind for each in config.programs}
    if "verify" not in kinds:
        raise ValueError("draft: expected programs that verify drafts, found none")
    contexts, own = (
        {each.bucket.get("context") for each in config.programs if each.kind == kind}
        for kind in ("decode", f"{DRAFT}decode")
    )
    if contexts != own:
        raise ValueError("draft: expected the contexts of the decoder, found others")
    left = tuple(each for each in config.programs if not each.kind.startswith(DRAFT))
    plain = tuple(replace(each, kind=each.kind.removeprefix(DRAFT)) for each in drafts)
    one = replace(config, decoder=draft, encoder=None, images=None, draft=None, programs=plain)
    return replace(config, draft=None, programs=left), one
