"""Ask every policy that applies whether targets of an open bundle may run, before any of it is loaded."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from prejit.runtime.errors import RejectError, UntrustedError
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.bundle_schema import Descriptor, ImageManifest
from prejit.runtime.format.layout import Layout, LayoutFiles
from prejit.runtime.format.names import BUNDLE_NAME, SIGNATURE_MEDIA_TYPE
from prejit.runtime.format.opening import OpenTarget, match, read_manifests
from prejit.runtime.format.referrers import Referrer, referrers
from prejit.runtime.format.root import Root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.trust.decision import Attached, Decision, TrustTarget, decide
from prejit.runtime.trust.policy import FirstLoadMode, Policy, Rule, read_policy
from prejit.runtime.trust.reasons import Reason
from prejit.runtime.trust.signed_statements import MAX_ENVELOPE_BYTES

if TYPE_CHECKING:
    from prejit.runtime.trust.channel import Outcome

_log = logging.getLogger(__name__)
MAX_LISTED = 256
"""Maximum number of entries of `index.json` that are read as possible signatures, at most 64 KiB each."""
MAX_ATTACHED = 64
"""Maximum number of signatures of a bundle and of one of its targets that are read."""


class PolicyVerdict(NamedTuple):
    """The decision of one policy (a file) about one target, and where a machine loads it first."""

    policy: str
    target: str
    decision: Decision
    first_load: FirstLoadMode = "direct"


class Enforced(NamedTuple):
    """What policies only report, and the policy that wants the first load in a child process, or None."""

    reported: tuple[str, ...]
    first_load: str | None = None


def verify_policies(bundle: str | os.PathLike[str], policies: Sequence[str]) -> list[PolicyVerdict]:
    """Return the decision of every policy about each target of a bundle.

    Raises:
        UntrustedError: one refuses a target.
        PolicyError: a policy cannot be read or applied.
        RejectError, StoreError: the bundle is damaged, or cannot be read.
    """

    def read(layout: Layout, root: Root) -> list[PolicyVerdict]:
        targets = match(root, Fingerprint.current())
        manifests = read_manifests(layout, targets)
        found = verdicts(policies, layout, root, targets, manifests)
        for verdict in found:
            _check(verdict, layout)
        return found

    return read_whole(bundle, read)


def enforce(
    paths: Sequence[str],
    layout: LayoutFiles,
    root: Root,
    targets: Iterable[OpenTarget],
    manifests: Mapping[str, ImageManifest],
) -> Enforced:
    """Check that every policy lets targets run; `manifests` are theirs, checked, by the target's name.

    Raises:
        UntrustedError: a policy refuses a target.
        PolicyError: a policy cannot be read or applied.
        RejectError: something that is attached to the bundle is damaged.
    """
    reported = []
    first_load = None
    for verdict in verdicts(paths, layout, root, targets, manifests):
        _check(verdict, layout)
        reported += [
            f"{layout.path}: {verdict.policy} reports about target {verdict.target} ({reason.case}): "
            f"{reason.text}"
            for reason in verdict.decision.reported
        ]
        if verdict.first_load == "child":
            first_load = first_load or verdict.policy
    return Enforced(tuple(reported), first_load)


def _check(verdict: PolicyVerdict, layout: LayoutFiles) -> None:
    if (refusal := verdict.decision.refusal) is not None:
        raise UntrustedError(
            str(layout.path),
            f"{verdict.policy} does not let target {verdict.target} run ({refusal.case}): {refusal.text}",
            case=refusal.case,
            hint=refusal.hint,
        )


def verdicts(
    paths: Sequence[str],
    layout: LayoutFiles,
    root: Root,
    targets: Iterable[OpenTarget],
    manifests: Mapping[str, ImageManifest],
) -> list[PolicyVerdict]:
    """Return the decision of every policy about every target. Arguments and errors as of `enforce`."""
    policies = [read_policy(path) for path in paths]
    now = time.time()
    attached = referrers(layout, root._replace(others=_may_sign(root)))
    found = []
    for target in targets:
        named = manifests[target.name].annotations.get(BUNDLE_NAME)
        if named != target.bundle:  # the rule of another name would decide
            raise RejectError(
                layout.blob_path(target.descriptor.digest),
                f"expected bundle {target.bundle!r:.80}, as the index, found {named!r:.80}",
            )
        about = TrustTarget(target.bundle, root.digest, target.descriptor.digest)
        signatures = list(_signatures(layout, attached, about))
        for policy in policies:
            rule = policy.rule_for(target.bundle)
            current = None if rule is None else _current_release(policy, rule, now)
            decision = decide(policy, about, signatures, current, now)
            first_load = "direct" if rule is None else rule.first_load
            found.append(PolicyVerdict(policy.path, target.name, decision, first_load))
            _log_verdict(found[-1], len(signatures))
    return found


def _log_verdict(verdict: PolicyVerdict, count: int) -> None:
    refusal, reported = verdict.decision.refusal, verdict.decision.reported
    _log.info(
        "policy %s: target %s %s; %d signatures, of which those of %s count",
        verdict.policy,
        verdict.target,
        "may run" if refusal is None else f"is refused ({refusal.case}): {refusal.text}",
        count,
        ", ".join(verdict.decision.signers) or "nobody",
    )
    for reason in reported:
        _log.info("policy %s only reports (%s): %s", verdict.policy, reason.case, reason.text)


def _may_sign(root: Root) -> tuple[Descriptor, ...]:
    """Return the entries of `index.json` that may be signatures. skopeo drops their artifact type."""
    found = [at for at in root.others if at.artifactType in (SIGNATURE_MEDIA_TYPE, None)]
    return tuple(found[:MAX_LISTED])


def _signatures(
    layout: LayoutFiles, attached: Iterable[Referrer], about: TrustTarget
) -> Iterable[Attached]:
    """Yield the signatures that are attached to a bundle or to a target of it."""
    count = 0
    for each in attached:
        is_signature = each.artifact_type == SIGNATURE_MEDIA_TYPE
        if not is_signature or each.subject.digest not in (about.digest, about.manifest):
            continue
        count += 1
        if count > MAX_ATTACHED:
            yield Reason(
                "too-many-signatures",
                "integrity",
                f"expected at most {MAX_ATTACHED} signatures, found more",
            )
            return
        yield _signature(layout, each)


def _signature(layout: LayoutFiles, referrer: Referrer) -> Attached:
    if len(referrer.layers) != 1 or referrer.layers[0].mediaType != SIGNATURE_MEDIA_TYPE:
        return Reason(
            "referrer-layers", "integrity", f"expected one layer of {SIGNATURE_MEDIA_TYPE}"
        )
    [at] = referrer.layers
    if at.size > MAX_ENVELOPE_BYTES:
        return Reason(
            "bundle-json-size",
            "integrity",
            f"expected at most {MAX_ENVELOPE_BYTES} bytes, found {at.size}",
        )
    try:
        return layout.read_blob(at)
    except RejectError as error:
        return Reason("referrer-damaged", "integrity", str(error))


def _current_release(policy: Policy, rule: Rule, now: float) -> Outcome | Reason | None:
    """Return the release of the channel that a rule names; None: it names none."""
    if rule.channel is None:
        return None
    # Most policies have no channel, and a start pays for each import.
    from prejit.runtime.trust.channel_following import current_release

    return current_release(policy, rule.channel, now)
