"""A channel never goes back: releases, expiry, thresholds, and the rotation of its keys."""

import json
import os
from datetime import UTC, datetime

import pytest
from tests.signers import signer

from prejit.compiler.base.statement_writing import encode_statement
from prejit.compiler.signing.channels import encode_channel, keys_statement, release_statement
from prejit.runtime.base import written_files
from prejit.runtime.errors import PolicyError
from prejit.runtime.trust.channel import Accepted, KeyMark, KeySet, accept
from prejit.runtime.trust.channel_following import ChannelState
from prejit.runtime.trust.reasons import RefusedError
from prejit.runtime.trust.signed_statements import (
    SIGNATURE_PREDICATE,
    Envelope,
    SignedSubject,
    Statement,
)

OLD, NEW = "sha256:" + "1" * 64, "sha256:" + "2" * 64
NOW = datetime(2026, 11, 22, tzinfo=UTC)
LATER = datetime(2027, 11, 22, tzinfo=UTC)


def keys_of(names):
    return tuple(signer(name).public for name in names)


def trusted(*names, threshold=1, version=0):
    return Accepted(KeySet(version, keys_of(names), threshold))


def signed(payload, names):
    return Envelope(payload, tuple(signer(name).sign(payload) for name in names))


def release(version, digest=NEW, by=("a",), name="stable", keys=0, expires=LATER):
    said = {"version": version, "keys_version": keys, "expires": expires}
    return signed(release_statement(name, "demo", (SignedSubject(digest),), **said), by)


def rotation(version, names, by, name="stable", threshold=1, expires=LATER):
    said = {"version": version, "threshold": threshold, "expires": expires}
    return signed(keys_statement(name, keys_of(names), **said), by)


def run(last, current, *rotations, **options):
    return accept(encode_channel(rotations, current), "stable", last, NOW.timestamp(), **options)


def refused(last, current, *rotations, **options):
    with pytest.raises(RefusedError) as raised:
        run(last, current, *rotations, **options)
    return raised.value.reason.case


def test_a_release_is_accepted_from_a_minimum_on_until_it_expires():
    found = run(trusted("a"), release(7))
    assert found.expired is None
    assert found.release.digests == {NEW}
    assert (found.accepted.version, found.accepted.release_keys_version) == (7, 0)
    last = found.accepted
    assert run(last, release(7)).release.version == 7  # the next start
    assert refused(last, release(6, OLD)) == "channel-rollback"
    assert refused(last, release(7, OLD)) == "channel-two-releases"
    assert run(last, release(8, OLD)).release.digests == {OLD}  # back, by a higher version
    assert refused(trusted("a"), release(7), minimum_version=8) == "channel-minimum"
    assert run(trusted("a"), release(8), minimum_version=8).release.version == 8
    late = release(7, expires=NOW)
    found = run(trusted("a"), late)
    assert found.expired.case == "channel-expired"
    last = run(trusted("a"), release(8)).accepted
    assert refused(last, late) == "channel-rollback"
    assert refused(trusted("a"), release(1, name="canary")) == "channel-name"
    payload = encode_statement(Statement(SIGNATURE_PREDICATE, (SignedSubject(NEW),)))
    assert refused(trusted("a"), signed(payload, ["a"])) == "predicate-type"
    revoked = frozenset({signer("a").public.id})
    assert refused(trusted("a"), release(1), revoked=revoked) == "channel-signature"


def test_too_few_signers_are_refused():
    for threshold, *by in ((1, "stranger"), (2, "a"), (2, "a", "a"), (2, "a", "stranger")):
        last = trusted("a", "b", threshold=threshold)
        assert refused(last, release(1, by=by)) == "channel-signature"
    enough = trusted("a", "b", "c", threshold=2)
    assert run(enough, release(1, by=["c", "a"])).release.version == 1


def test_rotations_are_walked_and_need_the_old_keys_and_the_new_ones():
    first = rotation(1, ["b", "c"], by=["a", "b", "c"], threshold=2)
    second = rotation(2, ["d"], by=["b", "c", "d"])
    found = run(trusted("a"), release(1, by=["d"], keys=2), first, second)
    assert found.accepted.keys.version == 2
    # A machine that has walked them reads the same file, and one that begins with newer keys too.
    assert run(found.accepted, release(1, by=["d"], keys=2), first, second).release.version == 1
    newer = trusted("b", "c", threshold=2, version=1)
    assert run(newer, release(1, by=["d"], keys=2), first, second).accepted.keys.version == 2
    first = rotation(1, ["b"], by=["a", "b"], expires=NOW)
    found = run(trusted("a"), release(1, by=["b"], keys=1), first)
    assert found.expired.case == "channel-keys-expired"
    second = rotation(2, ["c"], by=["b", "c"])
    assert run(trusted("a"), release(1, by=["c"], keys=2), first, second).expired is None
    by_new = release(1, by=["b"], keys=1)
    for by in (["b"], ["a"], ["stranger", "b"]):
        assert refused(trusted("a"), by_new, rotation(1, ["b"], by=by)) == "channel-signature"
    turn = rotation(1, ["b"], by=["a", "b"])  # one of two old keys
    assert refused(trusted("a", "c", threshold=2), by_new, turn) == "channel-signature"
    left_out = rotation(2, ["b"], by=["a", "b"])
    case = refused(trusted("a"), release(1, by=["b"], keys=2), left_out)
    assert case == "channel-keys-version"
    elsewhere = rotation(1, ["b"], by=["a", "b"], name="canary")
    assert refused(trusted("a"), by_new, elsewhere) == "channel-name"


def test_old_and_stolen_keys_neither_sign_nor_block():
    turn = rotation(1, ["b"], by=["a", "b"])
    last = run(trusted("a"), release(1, by=["b"], keys=1), turn).accepted
    assert refused(last, release(9)) == "channel-signature"
    # A key that stays does not bring an old release back.
    stays = rotation(1, ["a", "b"], by=["a", "b"])
    last = run(trusted("a"), release(1, by=["a"], keys=1), stays).accepted
    assert refused(last, release(9)) == "channel-release-keys"
    blocked = run(trusted("a"), release((1 << 53) - 1)).accepted
    turn = rotation(1, ["b"], by=["a", "b"])
    found = run(blocked, release(1, by=["b"], keys=1), turn)
    assert found.release.version == 1


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("channel-version", {"version": -1}),
        ("channel-version", {"version": 1 << 53}),
        ("channel-version", {"version": None}),
        ("channel-expires", {"expires": "tomorrow"}),
        ("channel-expires", {"expires": "2027-01-01T00:00:00+01:00"}),
        ("channel-release", {"bundle": None}),
        ("channel-name", {"channel": None}),
    ],
)
def test_a_release_that_is_signed_and_wrong_is_refused(case, change):
    found = json.loads(release(1).payload)
    found["predicate"] |= change
    assert refused(trusted("a"), signed(json.dumps(found).encode(), ["a"])) == case
    for key in [key for key, value in change.items() if value is None]:
        del found["predicate"][key]
        assert refused(trusted("a"), signed(json.dumps(found).encode(), ["a"])) == case


def test_keys_that_are_signed_and_wrong_are_refused():
    found = json.loads(rotation(1, ["b"], by=["a", "b"]).payload)
    keys = found["predicate"]["keys"]
    for change in (
        *({"keys": []}, {"keys": ["no key"]}, {"keys": keys * 2}, {"keys": keys * 20}),
        {"threshold": 0},
    ):
        wrong = json.dumps({**found, "predicate": found["predicate"] | change}).encode()
        turn = signed(wrong, ["a", "b"])
        assert refused(trusted("a"), release(1, by=["b"], keys=1), turn) == "channel-keys"


TYPE = b'{"mediaType":"application/vnd.prejit.channel.v1+json"'


@pytest.mark.parametrize(
    ("content", "case"),
    [
        (b"", "channel-json"),
        (b"{}", "channel-type"),
        (TYPE + b"}", "channel-keys"),
        (TYPE + b',"keys":[1]}', "envelope"),
        (TYPE + b',"keys":[' + b"0," * 256 + b"0]}", "channel-keys"),
        (b" " * (5 << 20), "channel-json-size"),
    ],
)
def test_files_that_are_no_channel_are_refused(content, case):
    with pytest.raises(RefusedError) as raised:
        accept(content, "stable", trusted("a"), NOW.timestamp())
    assert raised.value.reason.case == case


@pytest.fixture
def state():
    return ChannelState("/etc/trust.toml", "stable")


def test_what_was_accepted_is_read_again_and_a_state_must_be_kept(state, tmp_path, monkeypatch):
    turn = rotation(1, ["b", "c"], by=["a", "b"])
    accepted = run(trusted("a"), release(5, by=["b"], keys=1), turn).accepted
    with state.locked():
        assert state.read() is None
        state.write(accepted)
    found = state.read()
    assert found._replace(keys=accepted.keys) == accepted
    assert [key.id for key in found.keys.keys] == [key.id for key in accepted.keys.keys]
    assert (found.keys.threshold, found.keys.expires) == (1, LATER.timestamp())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(PolicyError, match="cannot keep"), ChannelState("x", "y").locked():
        pass


def test_a_damaged_state_or_mark_is_an_error_and_no_first_time(state):
    for damage in (b"", b"{}", b'{"keys":["\\ud800"]}', b"\xff"):
        with state.locked():
            state.write(trusted("a"))
        state.path.write_bytes(damage)
        with pytest.raises(PolicyError, match="state of a channel"):
            state.read()
    with state.locked():
        state.write(trusted("a"))
    state.path.chmod(0o666)
    with pytest.raises(PolicyError, match="others may write"):
        state.read()
    state.path.unlink()
    mark = KeyMark(1, OLD, 1, 3, NEW)
    with state.locked():
        assert state.mark("1" * 64) == KeyMark()
        state.write_mark("1" * 64, mark)
        assert state.mark("1" * 64) == mark
    [path] = state.path.parent.glob("*.json")
    for damage in (b"", b"[]", b'{"keys_version": "1"}'):
        path.write_bytes(damage)
        with pytest.raises(PolicyError, match="state of a channel"):
            state.mark("1" * 64)


def test_a_kill_right_after_a_state_got_its_name_locks_nobody_out(state, monkeypatch):
    def killed(directory):
        raise KeyboardInterrupt

    before = os.umask(0o002)  # with which a new file may be written by its group
    try:
        with state.locked(), monkeypatch.context() as patch:
            patch.setattr(written_files, "sync_directory", killed)
            with pytest.raises(KeyboardInterrupt):
                state.write(trusted("a"))
    finally:
        os.umask(before)
    assert state.read() is not None
