"""A store that hiccups stops no machine that shares a build; one that is down does."""

from __future__ import annotations

import io

import pytest
from tests.unit.compiler.sharing.fixtures import Memory

from prejit.compiler.sharing import patient
from prejit.compiler.sharing.patient import Patient
from prejit.compiler.sharing.remote import RemoteError


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient, "PAUSES_SECONDS", (0.0, 0.0))


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


def test_half_a_download_is_not_begun_again() -> None:
    """The caller has the first half already: it would get it twice."""

    class Half(Memory):
        def download(self, path: str, write: object) -> bool:
            write(memoryview(b"half"))  # type: ignore[operator]
            raise RemoteError("cut")

    got = bytearray()
    with pytest.raises(RemoteError, match="cut"):
        Patient(Half()).download("cas/x", got.extend)
    assert got == b"half"


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
