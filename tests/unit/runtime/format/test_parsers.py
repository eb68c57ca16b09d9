"""A sample of `make fuzz`: the parsers of what others write take no input badly."""

import contextlib
import random
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography comes with the extra trust")
pytest.importorskip("sigstore", reason="sigstore comes with the extra keyless")
pytest.importorskip("starlette", reason="starlette comes with the extra server")

from tests.campaigns.parser_fuzz import check
from tests.campaigns.parsers import PARSERS, changed
from tests.extent import examples


@pytest.mark.parametrize("name", PARSERS)
def test_an_input_of_others_is_refused_in_our_own_words(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(tmp_path))
    parser = PARSERS[name]
    seeds, parse = parser.seeds(), parser.make()
    accepted = 0  # or the search would not come behind the first checks
    for seed in seeds:
        check(parse, seed)
        with contextlib.suppress(Exception):
            parse(seed)
            accepted += 1
    assert accepted
    generator = random.Random(name)
    for number in range(examples(30, 60)):
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
