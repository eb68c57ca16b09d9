"""The rule: whether a policy lets a bundle run, from what is attached to it. No reading of files.

For each target that may run, rules P1 to P6 of runtime/check-order.toml, in this order. The level of
its rule decides whether a reason is enforced or only reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from prejit.runtime.trust import keyless_trust
from prejit.runtime.trust.keyless_trust import TrustedIdentity
from prejit.runtime.trust.policy import (
    ChannelRule,
    Policy,
    ProvenanceRule,
    Rule,
    TrustedKey,
    enforces,
)
from prejit.runtime.trust.policy_table import fits
from prejit.runtime.trust.reasons import Reason, RefusedError
from prejit.runtime.trust.signed_statements import (
    BUNDLE_ANNOTATION,
    PARTS_PREDICATE,
    PROVENANCE_PREDICATE,
    SIGNATURE_PREDICATE,
    Envelope,
    SignedSubject,
    Statement,
    read_bundle,
    read_statement,
)

if TYPE_CHECKING:
    from prejit.runtime.trust.channel import Outcome

MAX_VERIFICATIONS = 512
"""Maximum number of times that one decision tries a key on a signature; each takes about 0.1 ms."""


class TrustTarget(NamedTuple):
    """A target that may run: the bundle's name, and the digests of its index and of the target's manifest."""

    bundle: str
    digest: str
    manifest: str


TrustedSigner = TrustedKey | TrustedIdentity
"""Who may sign: the holder of a key, or an identity."""

Attached = bytes | Reason
"""A sigstore bundle that is attached to a bundle or to a manifest, or why it cannot be read."""


class CurrentRelease(NamedTuple):
    """The release of a channel that names a bundle.

    `signers` are names of the keys that signed it; after a rotation, the first 12 digits of their ids.
    """

    channel: str
    version: int
    signers: tuple[str, ...]


class Decision(NamedTuple):
    """The decision about a bundle.

    Attributes:
        refusal: why not; None: it may.
        reported: reasons that the level of the rule does not enforce.
        signers: names of the keys and identities whose signatures counted.
        release: the release of the rule's channel, if it names the bundle.
    """

    refusal: Reason | None
    reported: tuple[Reason, ...] = ()
    signers: tuple[str, ...] = ()
    release: CurrentRelease | None = None


def decide(
    policy: Policy,
    target: TrustTarget,
    attached: Sequence[Attached],
    current: Outcome | Reason | None,
    now: float,
) -> Decision:
    """Return whether a policy lets a target of a bundle run.

    Args:
        policy: the policy.
        target: the target.
        attached: the signatures that are attached to the bundle's index and to the target's manifest.
        current: the current release of the channel that the rule names, or why there is none.
        now: seconds since the epoch.
    """
    rule = policy.rule_for(target.bundle)
    if rule is None:
        text = f"expected a rule for the name {target.bundle!r:.80}, found none"
        return Decision(Reason("no-rule", "authenticity", text))
    if rule.level == "skip":
        return Decision(None)
    reasons = list(_revoked(policy, target))
    signers: dict[str, TrustedSigner] = {}
    if rule.threshold:
        counted, faults = _count(rule, policy, target, attached, now)
        late = [*counted.expired.items(), *counted.revoked.items()]
        # A signature that is late for a reason which the level does not enforce still counts.
        tolerated = {
            key_id: key for key_id, (key, why) in late if not enforces(rule.level, why.kind)
        }
        signers = tolerated | counted.valid
        if len(signers) < rule.threshold:
            refused = [why for _, (_, why) in late if enforces(rule.level, why.kind)]
            reasons.append(_why_too_few(rule, len(signers), refused, faults, bool(attached)))
        elif len(counted.valid) < rule.threshold:
            reasons += [why for _, (_, why) in late]
        if rule.provenance is not None or rule.sbom:
            reasons += missing_descriptions(rule, counted.descriptions, signers)
    release = None
    if rule.channel is not None:
        assert current is not None
        against = list(_channel_reasons(current, target))
        reasons += against
        if not isinstance(current, Reason) and all(why.kind == "expiry" for why in against):
            release = _current(rule.channel, current)
    enforced = [reason for reason in reasons if enforces(rule.level, reason.kind)]
    names = tuple(sorted(key.name for key in signers.values()))
    return Decision(
        enforced[0] if enforced else None,
        tuple(reason for reason in reasons if reason not in enforced),
        names,
        release,
    )


def _current(channel: ChannelRule, found: Outcome) -> CurrentRelease:
    names = {key.id: key.name for key in channel.keys}
    signers = sorted(names.get(key, key[:12]) for key in found.verified[-1].signers)
    return CurrentRelease(channel.name, found.release.version, tuple(signers))


def _revoked(policy: Policy, target: TrustTarget) -> Iterable[Reason]:
    for digest, what in ((target.digest, "bundle"), (target.manifest, "target's manifest")):
        if digest in policy.revoked_digests:
            yield Reason("digest-revoked", "revocation", f"the {what} {digest} is revoked")


class _Counted(NamedTuple):
    """Who signed, by id: those that count, and those that would, each with the reason why it does not.

    `descriptions`: what they signed of the descriptions that the rule demands.
    """

    valid: dict[str, TrustedSigner]
    expired: dict[str, tuple[TrustedSigner, Reason]]
    revoked: dict[str, tuple[TrustedSigner, Reason]]
    descriptions: list[Description]


def _count(
    rule: Rule, policy: Policy, target: TrustTarget, attached: Sequence[Attached], now: float
) -> tuple[_Counted, list[Reason]]:
    """Return who signed, and why other signatures do not count."""
    counted, faults = _Counted({}, {}, {}, []), list[Reason]()
    budget = MAX_VERIFICATIONS
    for each in attached:
        try:
            if isinstance(each, Reason):
                raise RefusedError(each.case, each.text, each.kind)
            envelope = read_bundle(each)
            known = rule.identities if envelope.is_keyless else rule.keys
            budget -= len(envelope.signatures) * len(known)
            if budget < 0:
                raise RefusedError(
                    "too-many-signatures",
                    f"expected signatures that {MAX_VERIFICATIONS} verifications decide, found more",
                )
            signers = _signers(each, envelope, rule)
            if rule.provenance or rule.sbom:
                described = description_of(envelope.payload, (target.digest, target.manifest))
                if described is not None:
                    ids = frozenset(signer.id for signer in signers)
                    counted.descriptions.append(Description(described, ids))
                    continue
            bundle = _subject_of(envelope, target).annotations.get(BUNDLE_ANNOTATION)
        except RefusedError as error:
            faults.append(error.reason)
            continue
        for signer in signers:
            _sort(counted, signer, bundle if bundle in policy.revoked_digests else None, now)
    return counted, faults


def _signers(content: bytes, envelope: Envelope, rule: Rule) -> Sequence[TrustedSigner]:
    """Return who of a rule made a signature. Raise RefusedError where nobody did."""
    if envelope.is_keyless:
        return [_signing_identity(content, envelope, rule)]
    return _signing_keys(envelope, rule)


def _signing_identity(content: bytes, envelope: Envelope, rule: Rule) -> TrustedIdentity:
    """Return the identity of a rule that made a keyless signature. It counts for one, whatever it names."""
    refused = RefusedError(
        "unknown-identity",
        "expected a signature by a key of the rule, which has no identities, found a keyless one",
        "authenticity",
    )
    for each in rule.identities:
        try:
            keyless_trust.verify(content, envelope, each)
        except RefusedError as error:
            refused = error
        else:
            return each
    raise refused


def _signing_keys(envelope: Envelope, rule: Rule) -> list[TrustedKey]:
    """Return the keys of a rule that signed an envelope. Raise RefusedError where none did."""
    if found := [each for each in rule.keys if envelope.is_signed_by(each.key)]:
        return found
    hinted = [each.name for each in rule.keys if each.key.is_hinted(envelope.hint)]
    if hinted:
        raise RefusedError(
            "wrong-signature", f"expected a signature by the key {hinted[0]}, found a wrong one"
        )
    raise RefusedError(
        "unknown-key",
        "expected a signature by a key of the rule, found one by another",
        "authenticity",
    )


def _subject_of(envelope: Envelope, target: TrustTarget) -> SignedSubject:
    """Return what an envelope signs: the bundle or the target's manifest. Raise RefusedError for all else."""
    statement = read_statement(envelope.payload, SIGNATURE_PREDICATE)
    for digest in (target.digest, target.manifest):
        if (subject := statement.about(digest)) is not None:
            return subject
    raise RefusedError(
        "other-subject",
        f"expected a signature of {target.digest} or of {target.manifest}, found one of "
        f"{statement.subjects[0].digest}",
    )


def _sort(counted: _Counted, each: TrustedSigner, revoked: str | None, now: float) -> None:
    """Sort a signer by whether it counts. `revoked`: a revoked bundle that the signature names."""
    who = f"the key {each.name}" if isinstance(each, TrustedKey) else f"the identity {each.name}"
    if revoked is not None:
        text = f"{who} signed the target in the bundle {revoked}, which is revoked"
        counted.revoked[each.id] = (each, Reason("bundle-revoked", "revocation", text))
    elif isinstance(each, TrustedKey) and each.is_revoked:
        counted.revoked[each.id] = (each, Reason("key-revoked", "revocation", f"{who} is revoked"))
    elif each.expires is not None and now >= each.expires:
        counted.expired[each.id] = (each, Reason("key-expired", "expiry", f"{who} has expired"))
    else:
        counted.valid[each.id] = each


def _why_too_few(
    rule: Rule, found: int, late: Sequence[Reason], faults: Sequence[Reason], is_any: bool
) -> Reason:
    """Return the reason why fewer signed than must, the most telling one."""
    named = (
        ("keys", [each.name for each in rule.keys]),
        ("identities", [each.name for each in rule.identities]),
    )
    names = " and the ".join(f"{kind} {', '.join(known)}" for kind, known in named if known)
    expected = f"expected signatures by {rule.threshold} of the {names}, found {found}"
    if late:
        return Reason(late[0].case, late[0].kind, f"{expected}: {late[0].text}")
    if found:
        also = f"; another does not count: {faults[0].text}" if faults else ""
        return Reason("threshold", "authenticity", expected + also)
    if not is_any:
        return Reason("unsigned", "authenticity", f"{expected}: nothing is attached")
    damaged = [fault for fault in faults if fault.kind != "authenticity"]
    first = (damaged or list(faults))[0]
    return Reason(first.case, first.kind, f"{expected}: {first.text}")


def _channel_reasons(found: Outcome | Reason, target: TrustTarget) -> Iterable[Reason]:
    if isinstance(found, Reason):
        yield found
        return
    from prejit.runtime.trust.channel import why_not_current

    if found.expired is not None:
        yield found.expired
    other = why_not_current(found.release, target.bundle, target.digest, target.manifest)
    if other is not None:
        yield other


class Description(NamedTuple):
    """A signed description of a bundle, with the ids of those of the rule who signed it."""

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
    """Yield why a bundle lacks the descriptions that a rule demands; `signers`: ids of those who count."""
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
