"""A channel's file is never replaced by one that the servers which follow it would refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")

from tests.signers import signer

from prejit.compiler.signing.channel_file import release_bundle, rotate_keys
from prejit.runtime.errors import UsageError

BUNDLE = Path(__file__).parents[3] / "format" / "v1" / "chunks"


@pytest.fixture
def stable(tmp_path: Path) -> Path:
    """A channel that key a released twice."""
    file = tmp_path / "stable.json"
    for _ in range(2):
        release_bundle(file, BUNDLE, "stable", [signer("a")], days=30)
    return file


def public(tmp_path: Path, name: str) -> Path:
    path = tmp_path / f"{name}.pub.pem"
    path.write_text(signer(name).public.pem)
    return path


def publish(file: Path, command: str, name: str, keys: list[str]) -> int:
    private = [signer(each) for each in keys]
    if command == "release":
        return release_bundle(file, BUNDLE, name, private, 30)
    return rotate_keys(file, name, [public(file.parent, keys[-1])], 1, private, 30)


@pytest.mark.parametrize("command", ["release", "rotate"])
@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("stable", ["stranger"], "--key: channel 'stable' expects a key that signed version 2"),
        ("other", ["a"], "--name: expected 'stable', the channel of this file, found 'other'"),
    ],
)
def test_another_key_or_name_changes_nothing(
    command: str, name: str, keys: list[str], expected: str, stable: Path
) -> None:
    before = stable.read_bytes()
    with pytest.raises(UsageError, match=expected) as raised:
        publish(stable, command, name, keys)
    assert raised.value.hint
    assert stable.read_bytes() == before


def test_after_a_rotation_only_the_new_key_releases(stable: Path) -> None:
    assert publish(stable, "rotate", "stable", ["a", "b"]) == 1
    before = stable.read_bytes()
    with pytest.raises(UsageError, match="expects a key of version 1 of its keys, found none"):
        publish(stable, "release", "stable", ["a"])
    assert stable.read_bytes() == before
    assert publish(stable, "release", "stable", ["b"]) == 4
    with pytest.raises(UsageError, match="expects a key of version 1"):
        publish(stable, "rotate", "stable", ["a", "c"])
    assert publish(stable, "rotate", "stable", ["b", "c"]) == 2


def test_one_of_several_keys_is_enough(stable: Path) -> None:
    assert publish(stable, "release", "stable", ["stranger", "a"]) == 3
    assert publish(stable, "release", "stable", ["stranger"]) == 4  # its people signed, too


@pytest.mark.parametrize("lost", ["channel", "version"])
def test_a_release_without_its_facts_is_no_channel(lost: str, stable: Path) -> None:
    import base64

    found: Any = json.loads(stable.read_bytes())
    payload = json.loads(base64.b64decode(found["release"]["payload"]))
    del payload["predicate"][lost]
    found["release"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    stable.write_text(json.dumps(found))
    with pytest.raises(UsageError, match="expected the file of a channel"):
        publish(stable, "release", "stable", ["a"])
