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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from prejit.runtime.base.digests import is_digest
from prejit.runtime.base.typed_json import shown
from prejit.runtime.errors import PolicyError
from prejit.runtime.trust.keyless import MAX_ROOT_BYTES, TrustedIdentity, check_root
from prejit.runtime.trust.keys import MAX_KEY_BYTES, PublicKey, read_key
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

_HINT = "docs/how-to/trust.md shows a policy"

_T = TypeVar("_T")
_Word = TypeVar("_Word", bound=str)


def enforces(level: Level, kind: Kind) -> bool:
    """Return whether a level refuses a bundle for a reason of this kind; if not, it warns."""
    return kind in _ENFORCED[level]


class TrustedKey(NamedTuple):
    """A key of a policy.

    Attributes:
        name: its name there.
        key: the key.
        expires: from when on its signatures do not count, in seconds since the epoch; None: never.
        is_revoked: whether they do not count any more.
    """

    name: str
    key: PublicKey
    expires: float | None = None
    is_revoked: bool = False

    @property
    def id(self) -> str:
        """A text that no other signer has."""
        return self.key.id


class ChannelRule(NamedTuple):
    """A channel that a policy follows.

    Attributes:
        name: its name.
        file: where its newest file is.
        keys: the keys of the version `keys_version` of its keys.
        threshold: how many of them must sign.
        keys_version: the version of the keys that this policy begins with.
        minimum_version: the lowest version of a release that counts, even on a machine that saw none.
    """

    name: str
    file: Path
    keys: tuple[TrustedKey, ...]
    threshold: int
    keys_version: int
    minimum_version: int


class Rule(NamedTuple):
    """Which signatures bundles of some names need.

    Attributes:
        names: patterns of names; `*` stands for any text.
        level: how much of it is enforced.
        keys: the keys whose signatures count.
        threshold: how many different keys and identities must sign; 0: the rule has none.
        channel: the channel whose current release the bundle must be, or None.
        identities: the identities whose keyless signatures count.
        first_load: where a machine loads such a bundle for the first time.
    """

    names: tuple[str, ...]
    level: Level
    keys: tuple[TrustedKey, ...] = ()
    threshold: int = 0
    channel: ChannelRule | None = None
    identities: tuple[TrustedIdentity, ...] = ()
    first_load: FirstLoadMode = "direct"

    def fits(self, name: str) -> bool:
        """Return whether a bundle's name fits one of the patterns."""
        return any(_fits(pattern, name) for pattern in self.names)


def _fits(pattern: str, name: str) -> bool:
    """Return whether a name fits a pattern, in linear time: whoever made the bundle chose its name."""
    first, *others = pattern.split("*")
    if not others:
        return name == pattern
    *middle, last = others
    if len(name) < len(first) + len(last) or not (name.startswith(first) and name.endswith(last)):
        return False
    at, end = len(first), len(name) - len(last)
    for part in middle:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


class Policy(NamedTuple):
    """A trust policy.

    Attributes:
        path: its file, for messages.
        rules: in the order of the file.
        revoked_keys: ids of keys.
        revoked_digests: digests of bundles and of manifests.
    """

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
        raise PolicyError(
            f"{of}: cannot read {path}: {reason}",
            hint="a policy that cannot be read lets no bundle run: mend the path, or its permissions",
        ) from error
    if len(content) > max_bytes:
        raise PolicyError(f"{of}: expected at most {max_bytes} bytes in {path}, found more")
    return content


def parse_policy(
    content: bytes, path: str, read_file: Callable[[str, str, int], bytes], directory: Path
) -> Policy:
    """Return the policy in a TOML text.

    Args:
        content: the text.
        path: its file, for errors.
        read_file: returns the content of a file beside the policy. It takes the file's name, the place in the
            policy for errors, and the maximum size in bytes.
        directory: the directory of the policy, which the names of files are relative to.

    Raises:
        PolicyError: it is wrong.
    """
    try:
        found = tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{path}: expected TOML: {error}", hint=_HINT) from error
    top = _Table(found, path, "")
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
    top: _Table, read_file: Callable[[str, str, int], bytes]
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


def _key(name: str, table: _Table, read_file: Callable[[str, str, int], bytes]) -> TrustedKey:
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


def _revoked_key(text: str, keys: Mapping[str, TrustedKey], table: _Table) -> str:
    if text in keys:
        return keys[text].key.id
    if is_digest(f"sha256:{text}"):
        return text
    raise table.error(
        f"expected the name of a key or 64 digits of 0-9a-f, found {text!r:.80}", "keys", keys
    )


def _channel(
    name: str, table: _Table, keys: Mapping[str, TrustedKey], directory: Path
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
    table: _Table,
    keys: Mapping[str, TrustedKey],
    identities: Mapping[str, TrustedIdentity],
    channels: Mapping[str, ChannelRule],
) -> Rule:
    table.only("names", "level", "keys", "identities", "threshold", "channel", "first_load")
    names = table.texts("names")
    if not names or not all(names):
        raise table.error(
            "expected names of bundles, such as `demo` or `team-*`, found none", "names"
        )
    levels: tuple[Level, ...] = ("strict", "permissive", "audit", "skip")
    level = table.choice("level", levels, "strict")
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
    return Rule(names, level, chosen, threshold, channel, people, first_load)


def _chosen(table: _Table, key: str, known: Mapping[str, _T]) -> tuple[_T, ...]:
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


def _threshold(table: _Table, count: int) -> int:
    threshold = table.integer("threshold", 1, 1)
    if threshold > count:
        raise table.error(
            f"expected at most {count}, the number of the keys and identities, found {threshold}",
            "threshold",
        )
    return threshold


class _Table:
    """A table of the policy and its place, which every error names."""

    def __init__(self, found: Mapping[str, Any], path: str, at: str) -> None:
        self._found = found
        self._path = path
        self._at = at

    def place(self, key: str = "") -> str:
        """Return where a key is, as text."""
        at = ".".join(part for part in (self._at, key) if part)
        return f"{self._path}: {at}" if at else self._path

    def error(self, text: str, key: str = "", known: Iterable[str] = ()) -> PolicyError:
        """Return the error about a key, with the nearest of the known names as its hint."""
        import difflib  # takes a start 1 ms, and most policies are right

        word = text.rpartition("found ")[2].strip("'")
        near = difflib.get_close_matches(word, list(known), 1)
        hint = f"did you mean {near[0]!r}?" if near else _HINT
        return PolicyError(f"{self.place(key)}: {text}", hint=hint)

    def only(self, *known: str) -> None:
        """Check that there are no other keys."""
        for key in self._found:
            if key not in known:
                names = ", ".join(known)
                raise self.error(f"expected only {names}, found {key!r:.80}", "", known)

    def has(self, key: str) -> bool:
        """Return whether a key is there."""
        return key in self._found

    def _value(self, key: str, kind: type[_T], expected: str) -> _T:
        value = self._found.get(key)
        if type(value) is not kind:
            found = "nothing" if value is None else shown(value)
            raise self.error(f"expected {expected}, found {found}", key)
        return value

    def text(self, key: str) -> str:
        """Return text, which must be there and not be empty."""
        text = self._value(key, str, "text")
        if not text:
            raise self.error("expected text, found an empty one", key)
        return text

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Return a list of text."""
        if default is not None and not self.has(key):
            return default
        listed: list[Any] = self._value(key, list, "a list of text")
        for each in listed:
            if type(each) is not str:
                raise self.error(f"expected text, found {shown(each)}", key)
        return tuple(listed)

    def integer(self, key: str, default: int, least: int) -> int:
        """Return an integer of at least `least`."""
        if not self.has(key):
            return default
        value = self._value(key, int, "an integer")
        if not least <= value < 1 << 53:
            raise self.error(f"expected {least} or more, found {shown(value)}", key)
        return value

    def choice(self, key: str, known: tuple[_Word, ...], default: _Word) -> _Word:
        """Return one of some words."""
        if not self.has(key):
            return default
        text = self.text(key)
        for word in known:
            if text == word:
                return word
        raise self.error(f"expected {', '.join(known)}, found {text!r:.80}", key, known)

    def moment(self, key: str) -> float | None:
        """Return a date (its first moment, UTC) or a time, in seconds; None: it is not there."""
        if not self.has(key):
            return None
        from datetime import UTC, date, datetime

        value = self._found[key]
        if type(value) is date:
            value = datetime(value.year, value.month, value.day, tzinfo=UTC)
        if type(value) is not datetime or value.tzinfo is None:
            raise self.error(
                "expected a date such as 2027-06-30 or a time with its offset such as "
                f"2027-06-30T12:00:00Z, found {shown(value)}",
                key,
            )
        return value.timestamp()

    def table(self, key: str) -> _Table:
        """Return a table; an empty one if it is not there."""
        found: dict[str, Any] = self._value(key, dict, "a table") if self.has(key) else {}
        return _Table(found, self._path, key)

    def tables(self, key: str) -> dict[str, _Table]:
        """Return the tables in a table, by name."""
        outer = self.table(key)
        return {
            name: _Table(outer._value(name, dict, "a table"), self._path, f"{key}.{name}")
            for name in outer._found
        }

    def list_of_tables(self, key: str) -> list[_Table]:
        """Return a list of tables; none if it is not there."""
        listed: list[Any] = self._value(key, list, "[[rules]]") if self.has(key) else []
        for each in listed:
            if type(each) is not dict:
                raise self.error(f"expected a table, found {shown(each)}", key)
        return [_Table(each, self._path, f"{key}[{place}]") for place, each in enumerate(listed)]
