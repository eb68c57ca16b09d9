"""A key that is not in the file must open nothing, and a file that opens nothing must not start a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from prejit.runtime.errors import StoreError, UsageError
from prejit.runtime.server.keys import read_keys

TEXT = (
    "# who may\n\nalice: 0123456789abcdef\n  fedcba9876543210  \nbob@example.org:  sk-0000000000\n"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.txt"


def test_each_key_has_the_name_of_its_owner(file: Path) -> None:
    file.write_text(TEXT)
    keys = read_keys(file)
    assert len(keys) == 3
    assert keys.name_of("Bearer 0123456789abcdef") == "alice"
    assert keys.name_of("bearer  fedcba9876543210") == "key-4"
    assert keys.name_of("Bearer sk-0000000000") == "bob@example.org"


@pytest.mark.parametrize(
    "header",
    [
        *("", "Bearer", "Bearer ", "0123456789abcdef", "Basic 0123456789abcdef"),
        *("Bearer 0123456789abcde", "Bearer 0123456789abcdef0", "Bearer alice", "Bearer \xff\xfe"),
        "Bearer " + "x" * 100_000,
    ],
)
def test_no_other_header_is_taken_for_a_key(header: str, file: Path) -> None:
    file.write_text(TEXT)
    assert read_keys(file).name_of(header) is None


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\n# nothing\n", b"short\n", b"two words\n", b"name: short\n", b"name:\n"),
        b"a: 0123456789\na: 9876543210\n",
        b"a: 0123456789\nb: 0123456789\n",
        b"a: \xff\xfe\xfd0123456789\n",
        b"k" * 300,
        b"k" * (2 << 20),
    ],
)
def test_a_file_without_usable_keys_is_an_error_that_shows_no_key(
    content: bytes, file: Path
) -> None:
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"keys\.txt") as caught:
        read_keys(file)
    assert "0123456789" not in caught.value.describe()


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(StoreError, match="cannot read the keys"):
            read_keys(path)
