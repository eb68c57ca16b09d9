"""A sample of `make fuzz`: the parsers of what others write take no input badly."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")
pytest.importorskip("sigstore", reason="sigstore comes with the extra keyless")
pytest.importorskip("starlette", reason="starlette comes with the extra server")

from tests.campaigns.parser_fuzz import FoundError, check
from tests.campaigns.parsers import PARSERS, changed

EXAMPLES = 60


@pytest.mark.parametrize("name", PARSERS)
def test_an_input_of_others_is_refused_in_our_own_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(tmp_path))
    parser = PARSERS[name]
    seeds, parse = parser.seeds(), parser.make()
    assert seeds
    for seed in seeds:
        check(parse, seed)
    generator = random.Random(name)
    for number in range(EXAMPLES):
        content = generator.choice(seeds)
        for _ in range(generator.randrange(1, 4)):
            content = changed(content, parser.form, generator) or content
        try:
            check(parse, content)
        except Exception as error:
            Path(tmp_path, "input").write_bytes(content)
            error.add_note(
                f"example {number}; python -m tests.campaigns.parser_fuzz {name!r} {tmp_path}/input"
            )
            raise


def test_a_seed_is_accepted_so_that_the_search_begins_behind_the_first_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(tmp_path))
    for name, parser in PARSERS.items():
        parse, accepted = parser.make(), 0
        for seed in parser.seeds():
            try:
                parse(seed)
                accepted += 1
            except Exception:
                continue
        assert accepted, name


def test_what_no_caller_expects_is_found() -> None:
    def raising(content: bytes) -> object:
        return {}[content]

    def controlling(_: bytes) -> object:
        from prejit.runtime.errors import RejectError

        raise RejectError("file", "x" * 5000 + "y" * 5000, hint="")

    with pytest.raises(KeyError):
        check(raising, b"")
    check(controlling, b"")  # its message is cut
    with pytest.raises(FoundError):
        check(lambda _: sum(range(10**8)) and None, b"")
