"""A key that is not in the file must open nothing, and a file that opens nothing must not start a server."""

import os

import pytest

from prejit.runtime.errors import StoreError, UsageError
from prejit.server.gate.api_keys import ANYBODY, Keys


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr("prejit.server.gate.api_keys._LOOK_SECONDS", 0.0)
    return tmp_path / "keys.txt"


def test_each_key_has_its_owner_and_limits_and_no_other_header_is_a_key(file):
    given = ("# who may\n", "alice: 0123456789abcdef", "  fedcba9876543210  ")
    file.write_text("\n".join((*given, "bob@example.org:  sk-0000000000\n")))
    keys = Keys(file)
    assert len(keys) == 3
    assert keys.find("Bearer 0123456789abcdef").name == "alice"
    assert keys.find("bearer  fedcba9876543210").name == "key-4"
    assert keys.find("Bearer sk-0000000000").name == "bob@example.org"
    for header in (
        *("", "Bearer", "Bearer ", "0123456789abcdef", "Basic 0123456789abcdef"),
        *("Bearer 0123456789abcde", "Bearer 0123456789abcdef0", "Bearer alice", "Bearer \xff\xfe"),
        "Bearer " + "x" * 100_000,
    ):
        assert keys.find(header) is None, header
    file.write_text(
        "alice: sk-000000  waiting=16 running=4 tokens_per_minute=600 priority=-5..10\n"
        "sk-111111 priority=2..\nbob: sk-222222\n"
    )
    keys = Keys(file)
    alice, second, bob = (keys.find(f"Bearer sk-{n * 6}") for n in "012")
    assert (alice.limits.waiting, alice.limits.running, alice.priorities) == (16, 4, (-5, 10))
    assert (second.name, second.priorities[0], second.limits) == ("key-2", 2, bob.limits)
    assert bob.priorities == ANYBODY.priorities
    assert bob.priorities[0] == 0  # nobody goes before the others unasked
    assert alice.meter.wait_seconds() == 0
    alice.limits.on_tokens(700)
    assert 5 < alice.meter.wait_seconds() <= 10.1  # 10 tokens come back each second


def test_a_file_without_usable_keys_is_an_error_that_shows_no_key(file):
    for content in (
        *(b"a: 0123456789 and more\n", b"a: 0123456789 limit=1\n", b"a: 0123456789 waiting=0\n"),
        *(b"a: 0123456789 priority=5\n", b"a: 0123456789 priority=5..1\n"),
        *(b"", b"\n# nothing\n", b"short\n", b"two words\n", b"name: short\n", b"name:\n"),
        *(b"a: 0123456789\na: 9876543210\n", b"a: 0123456789\nb: 0123456789\n"),
        *(b"a: 0123456789 running=2 running=3\n", b"a: \xff\xfe\xfd0123456789\n"),
        *(b"k" * 300, b"k" * (2 << 20)),
    ):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=r"keys\.txt") as caught:
            Keys(file)
        assert "0123456789" not in caught.value.describe()
    another = "found another word"
    for limits, expected in (
        ("waitng=4", f"{another}\n\nhint: did you mean waiting=?"),
        *(("running=2 running=3", "found running twice"), ("MTIz=0123456789", another)),
    ):
        file.write_text(f"a: sk-000000 {limits}\n")
        with pytest.raises(UsageError) as caught:
            Keys(file)
        assert caught.value.describe().endswith(expected)
    for path in (file.parent / "missing", file.parent):
        with pytest.raises(StoreError, match="cannot read the keys"):
            Keys(path)


def test_a_file_that_changes_is_read_again_and_no_other(file, monkeypatch, capsys, caplog):
    caplog.set_level("DEBUG", "prejit")
    line = "alice: sk-000000 tokens_per_minute=600\n"
    file.write_text(line + "bob: sk-111111\n")
    keys = Keys(file)
    alice = keys.find("Bearer sk-000000")
    alice.meter.spend(700)
    file.write_text(line + "bob: sk-222222\n")  # in place, with the same size
    assert keys.find("Bearer sk-111111") is None
    assert keys.find("Bearer sk-222222").name == "bob"
    # A change of the file gives no tokens back.
    assert keys.find("Bearer sk-000000").meter is alice.meter
    for content in ("bob: no\n", None, ""):
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        for _ in range(3):
            assert keys.find("Bearer sk-222222").name == "bob"
        said = capsys.readouterr().err
        assert said.count("The keys of before stay valid.") == 1
        assert "sk-2" not in said
    (file.parent / "new").write_text("carol: sk-333333\n")
    (file.parent / "new").rename(file)
    assert keys.find("Bearer sk-222222") is None
    assert keys.find("Bearer sk-333333").name == "carol"
    assert f"{file}: read again: 1 keys" in caplog.text
    assert "sk-" not in caplog.text
    os.utime(file, (1_700_000_000, 1_700_000_000))
    monkeypatch.setattr("prejit.server.gate.api_keys._SETTLED_SECONDS", -1.0)  # its ctime is now
    keys = Keys(file)
    monkeypatch.setattr("prejit.server.gate.api_keys._content", None)
    for _ in range(3):
        assert keys.find("Bearer sk-333333").name == "carol"
