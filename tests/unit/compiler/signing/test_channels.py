"""A channel's file is never replaced by one that the servers which follow it would refuse."""

import base64
import json

import pytest

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")

from tests.layouts import GOLDEN
from tests.signers import signer
from tests.threads import in_threads

from prejit.compiler.signing import channels
from prejit.compiler.signing.channels import (
    add_signature,
    read_channel,
    release_bundle,
    rotate_keys,
    sign_channel,
)
from prejit.runtime.errors import StoreError, UsageError
from prejit.runtime.trust.channel import signers

BUNDLE = GOLDEN / "chunks"


@pytest.fixture
def stable(tmp_path):
    file = tmp_path / "stable.json"
    for _ in range(2):
        release_bundle(file, BUNDLE, "stable", [signer("a")], days=30)
    return file


def public(tmp_path, name):
    path = tmp_path / f"{name}.pub.pem"
    path.write_text(signer(name).public.pem)
    return path


def publish(file, command, name, keys):
    private = [signer(each) for each in keys]
    if command == "release":
        return release_bundle(file, BUNDLE, name, private, 30)
    return rotate_keys(file, name, [public(file.parent, keys[-1])], 1, private, 30)


@pytest.mark.parametrize("command", ["release", "rotate"])
def test_another_key_or_name_changes_nothing(command, stable):
    before = stable.read_bytes()
    for name, key, expected in (
        ("stable", "stranger", "--key: channel 'stable' expects a key that signed version 2"),
        ("other", "a", "--name: expected 'stable', the channel of this file, found 'other'"),
    ):
        with pytest.raises(UsageError, match=expected) as raised:
            publish(stable, command, name, [key])
        assert raised.value.hint
    assert stable.read_bytes() == before
    assert publish(stable, "release", "stable", ["stranger", "a"]) == 3, "one of several is enough"
    assert publish(stable, "release", "stable", ["stranger"]) == 4  # its people signed, too


def test_after_a_rotation_only_the_new_key_releases_and_signs(stable):
    assert publish(stable, "rotate", "stable", ["a", "b"]) == 1
    before = stable.read_bytes()
    found = signer("a").id[:12]
    with pytest.raises(UsageError, match=f"expects a key of version 1 of its keys, found {found};"):
        publish(stable, "release", "stable", ["a"])
    assert stable.read_bytes() == before
    assert publish(stable, "release", "stable", ["b"]) == 4
    with pytest.raises(UsageError, match="expects a key of version 1"):
        publish(stable, "rotate", "stable", ["a", "c"])
    assert publish(stable, "rotate", "stable", ["b", "c"]) == 2
    before = stable.read_bytes()
    for stranger in ("stranger", "a"):  # a key that the channel does not have adds no signature
        with pytest.raises(UsageError, match="expects a key of version 2 of its keys, or of the"):
            sign_channel(stable, signer(stranger))
    assert stable.read_bytes() == before
    assert len(sign_channel(stable, signer("b")).rotations[-1].signatures) == 2


def test_a_release_without_its_facts_is_no_channel(stable):
    whole = json.loads(stable.read_bytes())
    for lost in ("channel", "version"):
        payload = json.loads(base64.b64decode(whole["release"]["payload"]))
        del payload["predicate"][lost]
        text = base64.b64encode(json.dumps(payload).encode()).decode()
        stable.write_text(json.dumps({**whole, "release": {**whole["release"], "payload": text}}))
        with pytest.raises(UsageError, match="expected the file of a channel"):
            publish(stable, "release", "stable", ["a"])


def test_all_who_sign_or_release_at_once_have_done_so(stable):
    people = [signer(f"person {number}") for number in range(8)]
    in_threads(len(people), lambda number: sign_channel(stable, people[number]))
    release = read_channel(stable.read_bytes(), "stable").release
    assert len(release.signatures) == 1 + len(people)
    found = list[int]()
    in_threads(6, lambda _: found.append(publish(stable, "release", "stable", ["a"])))
    assert sorted(found) == [3, 4, 5, 6, 7, 8]


def test_a_file_that_changes_meanwhile_is_not_overwritten(stable):
    """As where two machines share a file system without locks."""

    def change(before):
        stable.write_bytes(add_signature(before, signer("b")).encode())
        return add_signature(before, signer("c"))

    with pytest.raises(StoreError, match="another process has changed it meanwhile") as raised:
        channels._change(stable, change)
    assert raised.value.hint
    release = read_channel(stable.read_bytes(), "stable").release
    assert release is not None
    assert signers(release, [signer("b").public, signer("c").public]) == {signer("b").id}
