"""A store that hiccups stops no machine that shares a build; one that is down does."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from tests.unit.compiler.sharing.fixtures import Memory

from prejit.compiler.sharing import remote
from prejit.compiler.sharing.remote import Patient, RemoteError


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSES_SECONDS", (0.0, 0.0))


class Hiccup(Memory):
    """Every request fails at first; one that is begun may have taken effect."""

    left = 1

    def _check(self) -> None:
        if self.left:
            self.left -= 1
            raise RemoteError("hiccup")


def test_a_request_is_tried_again() -> None:
    place = Hiccup()
    store = Patient(place)
    store.write("cas/x", io.BytesIO(b"content"))
    assert place.files == {"cas/x": b"content"}
    place.left = 2
    assert store.read("cas/x", 100) == b"content"
    place.left = 1
    assert store.has("cas/x")
    place.left = 1
    got = bytearray()
    assert store.download("cas/x", got.extend)
    assert got == b"content"


def test_one_that_is_down_is_an_error() -> None:
    with pytest.raises(RemoteError, match="down"):
        Patient(Memory(fails="down")).read("ac/x", 1)


@pytest.mark.parametrize("cut_at", [(1000,), (2500, 700), (700, 2500), (0, 3000)])
def test_a_download_that_is_cut_goes_on_where_it_was(cut_at: tuple[int, ...]) -> None:
    """A server that is restarted must not end the build of a machine that was just reading from it."""
    content = bytes(range(250)) * 12

    class Cut(Memory):
        def download(self, path: str, write: Callable[[memoryview], object]) -> bool:
            most = cuts.pop(0) if cuts else len(content) + 1
            for start in range(0, min(most, len(content)), 333):
                write(memoryview(content[start : min(start + 333, most)]))
            if most <= len(content):
                raise RemoteError("cut")
            return True

    cuts, got = [*cut_at], bytearray()
    assert Patient(Cut()).download("cas/x", got.extend)
    assert got == content


def test_a_file_that_was_created_without_an_answer_is_ours() -> None:
    class Deaf(Memory):
        answers = False

        def create(self, path: str, content: bytes) -> bool:
            created = super().create(path, content)
            if not self.answers:
                self.answers = True
                raise RemoteError("no answer")
            return created

    assert Patient(Deaf()).create("ac/x", b"mine")
    other = Deaf(files={"ac/x": b"theirs"})
    assert not Patient(other).create("ac/x", b"mine")
