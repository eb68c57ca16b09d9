"""The rule about descriptions: whether signed provenance and list of parts (SBOM) are as demanded.

No reading of files: what is signed has the whole description in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prejit.runtime.trust.policy import ProvenanceRule, Rule
from prejit.runtime.trust.policy_table import fits
from prejit.runtime.trust.reasons import Reason, RefusedError
from prejit.runtime.trust.statement import (
    PARTS_PREDICATE,
    PROVENANCE_PREDICATE,
    Statement,
    read_statement,
)


class Description(NamedTuple):
    """A signed description of a bundle.

    Attributes:
        statement: the statement.
        signers: ids of those of the rule who signed it.
    """

    statement: Statement
    signers: frozenset[str]


def description_of(payload: bytes, digests: Collection[str]) -> Statement | None:
    """Return the provenance or list of parts in an envelope, if it is about one of these digests."""
    for predicate in (PROVENANCE_PREDICATE, PARTS_PREDICATE):
        with contextlib.suppress(RefusedError):
            statement = read_statement(payload, predicate)
            return statement if any(map(statement.about, digests)) else None
    return None


def missing_descriptions(
    rule: Rule, found: Sequence[Description], signers: Collection[str]
) -> Iterable[Reason]:
    """Yield why a bundle lacks the descriptions that a rule demands.

    Args:
        rule: the rule.
        found: the signed descriptions of the bundle.
        signers: ids of those whose signatures count.
    """
    if rule.provenance is not None:
        yield from _missing(rule, PROVENANCE_PREDICATE, found, signers)
    if rule.sbom:
        yield from _missing(rule, PARTS_PREDICATE, found, signers)


def _missing(
    rule: Rule, predicate: str, found: Sequence[Description], signers: Collection[str]
) -> Iterable[Reason]:
    case, what = ("sbom", "list of parts (SBOM)")
    if predicate == PROVENANCE_PREDICATE:
        case = what = "provenance"
    fitting, problem = set[str](), ""
    for each in found:
        if each.statement.predicate_type == predicate:
            why = _why_not(rule, each.statement)
            problem = problem or why or ""
            fitting |= each.signers if why is None else frozenset()
    count = len(fitting.intersection(signers))
    if count < rule.threshold:
        text = f"expected a {what} that {rule.threshold} of the rule signed, found {count}"
        yield Reason(case, "authenticity", f"{text}: {problem}" if problem else text)


def _why_not(rule: Rule, statement: Statement) -> str | None:
    """Return why a description is not what a rule demands; None: it is."""
    if statement.predicate_type == PROVENANCE_PREDICATE:
        assert rule.provenance is not None
        return _why_not_built_so(rule.provenance, statement.predicate)
    kind = statement.predicate.get("bomFormat")
    return None if kind == "CycloneDX" else f"expected bomFormat CycloneDX, found {kind!r:.80}"


def _why_not_built_so(rule: ProvenanceRule, predicate: Mapping[str, Any]) -> str | None:
    builder = _inside(predicate, "runDetails", "builder", "id")
    if rule.builder and not (isinstance(builder, str) and fits(rule.builder, builder)):
        return f"expected the builder {rule.builder!r}, found {builder!r:.80}"
    listed = _inside(predicate, "buildDefinition", "resolvedDependencies")
    materials = listed if isinstance(listed, list) else []
    uris = [uri for each in materials if isinstance(uri := _inside(each, "uri"), str)]
    sources = [uri for uri in uris if not uri.startswith("pkg:")]
    if rule.source and not sources:
        return "expected a source, found no material with a URI that is no package"
    for uri in sources if rule.source else ():
        if not any(fits(pattern, uri) for pattern in rule.source):
            return f"expected a source of {', '.join(rule.source)}, found {uri!r:.200}"
    digests = [_inside(each, "digest", "sha256") for each in materials]
    names = [*uris, *(f"sha256:{digest}" for digest in digests if isinstance(digest, str))]
    for pattern in rule.materials:
        if not any(fits(pattern, name) for name in names):
            return f"expected the material {pattern!r:.200}, found none that fits"
    return None


def _inside(plain: Any, *keys: str) -> Any:
    """Return the value at a path of keys; None: it is not there."""
    for key in keys:
        plain = plain.get(key) if isinstance(plain, Mapping) else None
    return plain
