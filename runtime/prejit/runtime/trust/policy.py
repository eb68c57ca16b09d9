"""`trust.toml`: which bundles must be signed by whom.

    [keys.release]
    file = "release.pub.pem"            # beside this file; or pem = "-----BEGIN PUBLIC KEY..."
    expires = 2027-06-30                # from this moment on its signatures no longer count

    [identities.ci]                     # keyless: who signs, by a certificate of sigstore
    identity = "https://github.com/acme/models/.github/workflows/release.yml@refs/heads/main"
    issuer = "https://token.actions.githubusercontent.com"
    trusted_root = "trusted_root.json"  # beside this file

    [[rules]]                           # the first rule whose names fit decides; no rule: refused
    names = ["demo", "team-*"]
    level = "strict"                    # strict (default), permissive, audit or skip
    keys = ["release", "security"]
    identities = ["ci"]
    threshold = 2                       # so many of the keys and identities, each once (default 1)
    channel = "stable"
    sbom = true                         # a list of parts that they signed must be attached
    provenance = {builder = "urn:prejit:builder", source = ["hf:acme/*"], materials = ["pkg:pypi/jax@0.12.*"]}
    first_load = "child"                # try the first load of a machine in a child process (or "direct")

    [channels.stable]
    file = "stable.json"
    keys = ["release"]                  # of the channel's first version; see `channel`
    threshold = 1
    keys_version = 0
    minimum_version = 3

    [revoked]
    keys = ["release", "64 hexadecimal digits: sha256 of the DER form"]
    digests = ["sha256:..."]            # of a bundle, or of a target's manifest

The policy is the administrator's own file, so it is read strictly: an unknown key is an error, never ignored.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from prejit.runtime.base.files import is_digest
from prejit.runtime.base.wording import nearest_file
from prejit.runtime.errors import PolicyError
from prejit.runtime.trust.keyless_trust import MAX_ROOT_BYTES, TrustedIdentity, check_root
from prejit.runtime.trust.policy_table import HINT, Table, fits
from prejit.runtime.trust.public_keys import MAX_KEY_BYTES, PublicKey, read_key
from prejit.runtime.trust.reasons import Kind

FirstLoadMode = Literal["direct", "child"]
"""The process in which a machine loads a new bundle first: its own, or a child."""

Level = Literal["strict", "permissive", "audit", "skip"]
"""How much of a rule is enforced, as notation has it."""

_ENFORCED: Mapping[Level, frozenset[Kind]] = {
    "strict": frozenset({"integrity", "authenticity", "expiry", "revocation"}),
    "permissive": frozenset({"integrity", "authenticity"}),
    "audit": frozenset({"integrity"}),
    "skip": frozenset(),
}

MAX_POLICY_BYTES = 1 << 20
"""Maximum size of a policy."""
_MAX_RULE_KEYS = 16
"""Maximum number of keys of a rule or a channel, and of identities: a signature may be tried with each."""

_T = TypeVar("_T")


def enforces(level: Level, kind: Kind) -> bool:
    """Return whether a level refuses a bundle for a reason of this kind; if not, it warns."""
    return kind in _ENFORCED[level]


class TrustedKey(NamedTuple):
    """A key of a policy. From `expires` (seconds since the epoch; None: never) it does not count."""

    name: str
    key: PublicKey
    expires: float | None = None
    is_revoked: bool = False

    @property
    def id(self) -> str:
        """A text that no other signer has."""
        return self.key.id


class ChannelRule(NamedTuple):
    """A channel that a policy follows: its newest file, and its keys of the version `keys_version`.

    `threshold` of them must sign; no release below `minimum_version` counts, even on a machine that saw none.
    """

    name: str
    file: Path
    keys: tuple[TrustedKey, ...]
    threshold: int
    keys_version: int
    minimum_version: int


class ProvenanceRule(NamedTuple):
    """The demands of a rule on the signed provenance of a bundle. `*` in a pattern stands for any text.

    `builder`: of the builder's id; empty: any. `source`: of the URIs of what it was built from, packages
    excepted; none: anything. `materials`: of URIs or digests; each must match a material.
    """

    builder: str
    source: tuple[str, ...]
    materials: tuple[str, ...]


class Rule(NamedTuple):
    """Which signatures bundles of some names need.

    Attributes:
        names: patterns of names; `*` stands for any text.
        level: how much of it is enforced.
        keys, identities: those whose signatures count.
        threshold: how many different keys and identities must sign; 0: the rule has none.
        channel: the channel whose current release the bundle must be, or None.
        first_load: where a machine loads such a bundle for the first time.
        provenance: what its signed provenance must say; None: it needs none.
        sbom: whether it needs a signed list of parts.
    """

    names: tuple[str, ...]
    level: Level
    keys: tuple[TrustedKey, ...] = ()
    threshold: int = 0
    channel: ChannelRule | None = None
    identities: tuple[TrustedIdentity, ...] = ()
    first_load: FirstLoadMode = "direct"
    provenance: ProvenanceRule | None = None
    sbom: bool = False

    def fits(self, name: str) -> bool:
        """Return whether a bundle's name fits one of the patterns."""
        return any(fits(pattern, name) for pattern in self.names)


class Policy(NamedTuple):
    """A trust policy: its file, its rules in order, ids of revoked keys, digests of what else is revoked."""

    path: str
    rules: tuple[Rule, ...]
    revoked_keys: frozenset[str] = frozenset()
    revoked_digests: frozenset[str] = frozenset()

    def rule_for(self, name: str) -> Rule | None:
        """Return the first rule that fits a bundle's name, or None."""
        return next((rule for rule in self.rules if rule.fits(name)), None)


def read_policy(path: str | os.PathLike[str]) -> Policy:
    """Read a policy, and the keys that it names.

    Raises:
        PolicyError: it cannot be read or is wrong, or `cryptography` is not installed.
    """
    where = Path(path)
    content = _read(where, MAX_POLICY_BYTES, str(where))
    return parse_policy(
        content,
        str(where),
        lambda name, of, most: _read(where.parent / name, most, of),
        where.parent,
    )


def _read(path: Path, max_bytes: int, of: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        near = nearest_file(path) if isinstance(error, FileNotFoundError) else None
        raise PolicyError(
            f"{path}: cannot read: {reason}"
            if of == str(path)
            else f"{of}: cannot read {path}: {reason}",
            hint="a policy that cannot be read lets no bundle run: "
            + ("mend the path, or its permissions" if near is None else f"did you mean {near}?"),
        ) from error
    if len(content) > max_bytes:
        raise PolicyError(f"{of}: expected at most {max_bytes} bytes in {path}, found more")
    return content


def parse_policy(
    content: bytes, path: str, read_file: Callable[[str, str, int], bytes], directory: Path
) -> Policy:
    """Return the policy in a TOML text.

    `read_file` returns the content of a file beside the policy, from its name, the place in the policy for
    errors, and the maximum size in bytes. `directory` is what the names of files are relative to.

    Raises:
        PolicyError: it is wrong.
    """
    try:
        found = tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{path}: expected TOML: {error}", hint=HINT) from error
    top = Table(found, path, "")
    top.only("keys", "identities", "rules", "channels", "revoked")
    keys: dict[str, TrustedKey] = {}
    names_of: dict[str, str] = {}
    for name, table in top.tables("keys").items():
        keys[name] = _key(name, table, read_file)
        first = names_of.setdefault(keys[name].key.id, name)
        if first != name:
            raise table.error(f"expected another key than that of keys.{first}, found the same")
    revoked = top.table("revoked")
    revoked.only("keys", "digests")
    revoked_keys = frozenset(
        _revoked_key(text, keys, revoked) for text in revoked.texts("keys", ())
    )
    revoked_digests = frozenset(revoked.texts("digests", ()))
    for text in revoked_digests:
        if not is_digest(text):
            raise revoked.error(
                f"expected sha256: and 64 digits of 0-9a-f, found {text!r:.80}", "digests"
            )
    keys = {
        name: each._replace(is_revoked=each.key.id in revoked_keys) for name, each in keys.items()
    }
    channels = {
        name: _channel(name, table, keys, directory)
        for name, table in top.tables("channels").items()
    }
    identities = _identities(top, read_file)
    rules = tuple(_rule(table, keys, identities, channels) for table in top.list_of_tables("rules"))
    if not rules:
        raise top.error("expected at least one [[rules]], found none; such a policy allows nothing")
    for place, rule in enumerate(rules[:-1]):
        if any(set(name) == {"*"} for name in rule.names):
            raise PolicyError(
                f"{path}: rules[{place}].names: expected `*` in the last rule alone, found rules behind it",
                hint="the first rule that fits decides: move this one to the end",
            )
    return Policy(path, rules, revoked_keys, revoked_digests)


def _identities(
    top: Table, read_file: Callable[[str, str, int], bytes]
) -> dict[str, TrustedIdentity]:
    found: dict[str, TrustedIdentity] = {}
    names_of: dict[str, str] = {}
    for name, table in top.tables("identities").items():
        table.only("identity", "issuer", "trusted_root", "expires")
        who, issuer = table.text("identity"), table.text("issuer")
        where = table.place("trusted_root")
        root = read_file(table.text("trusted_root"), where, MAX_ROOT_BYTES)
        check_root(root, where)
        found[name] = TrustedIdentity(name, who, issuer, root, where, table.moment("expires"))
        first = names_of.setdefault(found[name].id, name)
        if first != name:
            raise table.error(f"expected another one than identities.{first}, found the same")
    return found


def _key(name: str, table: Table, read_file: Callable[[str, str, int], bytes]) -> TrustedKey:
    table.only("file", "pem", "expires")
    if table.has("file") == table.has("pem"):
        raise table.error(
            "expected one of file and pem, found " + ("both" if table.has("pem") else "none")
        )
    if table.has("file"):
        pem = read_file(table.text("file"), table.place("file"), MAX_KEY_BYTES)
    else:
        pem = table.text("pem").encode("utf-8")
    key = read_key(pem, table.place("file" if table.has("file") else "pem"))
    return TrustedKey(name, key, table.moment("expires"))


def _revoked_key(text: str, keys: Mapping[str, TrustedKey], table: Table) -> str:
    if text in keys:
        return keys[text].key.id
    if is_digest(f"sha256:{text}"):
        return text
    raise table.error(
        f"expected the name of a key or 64 digits of 0-9a-f, found {text!r:.80}", "keys", keys
    )


def _channel(
    name: str, table: Table, keys: Mapping[str, TrustedKey], directory: Path
) -> ChannelRule:
    table.only("file", "keys", "threshold", "keys_version", "minimum_version")
    chosen = _chosen(table, "keys", keys)
    if not chosen:
        raise table.error("expected at least one key, found none", "keys")
    return ChannelRule(
        name,
        directory / table.text("file"),
        chosen,
        _threshold(table, len(chosen)),
        table.integer("keys_version", 0, 0),
        table.integer("minimum_version", 0, 0),
    )


def _rule(
    table: Table,
    keys: Mapping[str, TrustedKey],
    identities: Mapping[str, TrustedIdentity],
    channels: Mapping[str, ChannelRule],
) -> Rule:
    table.only(
        *("names", "level", "keys", "identities", "threshold", "channel", "first_load"),
        *("provenance", "sbom"),
    )
    names = table.texts("names")
    if not names or not all(names):
        raise table.error(
            "expected names of bundles, such as `demo` or `team-*`, found none", "names"
        )
    level = table.choice("level", tuple(_ENFORCED), "strict")
    chosen = _chosen(table, "keys", keys)
    people = _chosen(table, "identities", identities)
    count = len(chosen) + len(people)
    channel = None
    if table.has("channel"):
        text = table.text("channel")
        if text not in channels:
            raise table.error(
                f"expected the name of a channel, found {text!r:.80}", "channel", channels
            )
        channel = channels[text]
    if level == "skip" and (count or channel):
        raise table.error("expected no keys, identities or channel at level skip, found some")
    if level != "skip" and not (count or channel):
        raise table.error("expected keys, identities or a channel, found none", "keys")
    threshold = _threshold(table, count) if count else 0
    if not count and table.has("threshold"):
        raise table.error("expected keys or identities beside a threshold, found none", "threshold")
    modes: tuple[FirstLoadMode, ...] = ("direct", "child")
    first_load = table.choice("first_load", modes, "direct")
    for key in ("provenance", "sbom"):
        if table.has(key) and (level == "skip" or not count):
            raise table.error(
                f"expected keys or identities that sign it, at another level than skip, found {key}",
                key,
            )
    provenance = _provenance(table.table("provenance")) if table.has("provenance") else None
    return Rule(
        *(names, level, chosen, threshold, channel, people, first_load, provenance),
        table.flag("sbom"),
    )


def _provenance(table: Table) -> ProvenanceRule:
    table.only("builder", "source", "materials")
    builder = table.text("builder") if table.has("builder") else ""
    patterns = {key: table.texts(key, ()) for key in ("source", "materials")}
    for key, listed in patterns.items():
        if table.has(key) and not listed:
            raise table.error("expected patterns, found none; leave it out if any will do", key)
    return ProvenanceRule(builder, **patterns)


def _chosen(table: Table, key: str, known: Mapping[str, _T]) -> tuple[_T, ...]:
    """Return the keys or identities that a rule or a channel names."""
    names = table.texts(key, ())
    for name in names:
        if name not in known:
            what = "a key" if key == "keys" else "an identity"
            raise table.error(f"expected the name of {what}, found {name!r:.80}", key, known)
    if len(set(names)) != len(names):
        what = "key" if key == "keys" else "identity"
        raise table.error(f"expected each {what} once", key)
    if len(names) > _MAX_RULE_KEYS:
        raise table.error(f"expected at most {_MAX_RULE_KEYS} {key}, found {len(names)}", key)
    return tuple(known[name] for name in names)


def _threshold(table: Table, count: int) -> int:
    threshold = table.integer("threshold", 1, 1)
    if threshold > count:
        raise table.error(
            f"expected at most {count}, the number of the keys and identities, found {threshold}",
            "threshold",
        )
    return threshold
