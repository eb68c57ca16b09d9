"""Ask the trust policies that let a bundle run whether they let an adapter be loaded beside its weights."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from prejit.runtime.errors import UntrustedError, UntrustedWarning
from prejit.runtime.lora.peft_files import SIGNATURES
from prejit.runtime.trust.decision import Decision, TrustTarget, decide
from prejit.runtime.trust.policy import Policy, read_policy
from prejit.runtime.trust.reasons import Reason
from prejit.runtime.trust.signed_statements import MAX_ENVELOPE_BYTES, MAX_SIGNATURES


def check_adapter(policies: Sequence[str], bundle: str, path: Path, digest: str) -> None:
    """Check that every policy lets an adapter be loaded into a bundle.

    The rule for the bundle's name decides which keys and identities must have signed the adapter, too. A rule
    that asks for no signatures, because a channel names the bundle, lets no adapter be loaded.

    Args:
        policies: the files of the policies.
        bundle: the name of the bundle.
        path: the directory of the adapter.
        digest: of its files, as they were read.

    Raises:
        UntrustedError: a policy refuses it.
        PolicyError: a policy cannot be read.
    """
    for each in policies:
        policy = read_policy(each)
        decision = _decision(policy, TrustTarget(bundle, digest, digest), path)
        if (refusal := decision.refusal) is not None:
            raise UntrustedError(
                str(path),
                f"{policy.path} does not let the adapter be loaded into {bundle} ({refusal.case}): "
                f"{refusal.text}",
                case=refusal.case,
                hint=f"sign it as it is now, with a key of the rule: prejit sign {path} --key KEY",
            )
        for reason in decision.reported:
            text = f"{path}: {policy.path} reports about the adapter ({reason.case}): {reason.text}"
            warnings.warn(text, UntrustedWarning, stacklevel=2)


def _decision(policy: Policy, target: TrustTarget, path: Path) -> Decision:
    rule = policy.rule_for(target.bundle)
    if rule is None or rule.level == "skip":
        return decide(policy, target, (), None, time.time())
    if not rule.threshold:
        text = "expected a rule with keys or identities that sign adapters, found one with a channel alone"
        return Decision(Reason("no-adapter-keys", "authenticity", text))
    alone = rule._replace(channel=None, provenance=None, sbom=False)
    signatures = _signatures(path / SIGNATURES)
    return decide(policy._replace(rules=(alone,)), target, signatures, None, time.time())


def _signatures(file: Path) -> list[bytes]:
    """Return the lines of the file of signatures; none if there is no file."""
    if not file.is_file():  # to open a FIFO would wait for ever
        return []
    try:
        with file.open("rb") as opened:
            return opened.read(MAX_SIGNATURES * MAX_ENVELOPE_BYTES).splitlines()[:MAX_SIGNATURES]
    except OSError:
        return []
