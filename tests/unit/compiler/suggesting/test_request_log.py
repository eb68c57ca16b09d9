"""What a log says, and what is said of a log that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prejit.compiler.suggesting.request_log import LoggedEncoding, LoggedGeneration, read_log
from prejit.runtime.errors import StoreError, UsageError


def log(tmp_path: Path, *lines: Any, name: str = "log.jsonl") -> Path:
    path = tmp_path / name
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return path


def request(time: float, seconds: float, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"event": "request", "time": time, "seconds": seconds, "calls": calls}


def generate(model: str = "demo", **counts: int) -> dict[str, Any]:
    return {"kind": "generate", "model": model, "prompt_tokens": 20, "new_tokens": 5, **counts}


def test_the_log_of_a_server_gives_lengths_and_how_many_ran_at_once(tmp_path: Path) -> None:
    path = log(
        tmp_path,
        {"event": "start", "models": []},
        request(10.0, 4.0, generate(reused_tokens=16)),
        request(11.0, 3.0, generate()),
        request(12.0, 0.1, {"kind": "generate", "model": "demo", "token_ids": None}),  # it failed
    )
    found = read_log(path)
    assert found.generations == {LoggedGeneration(4, 5, 16): 1, LoggedGeneration(20, 5): 1}
    assert found.seconds_at == {1: 3.0, 2: 2.0}
    call = {"kind": "encode", "model": "e", "sentences": 2, "tokens": 31}  # their mean length
    assert read_log(log(tmp_path, request(1.0, 0.5, call))).encodings == {LoggedEncoding(16, 2): 1}


def test_what_a_server_writes_is_what_is_read(tmp_path: Path) -> None:
    requestlog = pytest.importorskip(
        "prejit.server.telemetry.requestlog", reason="msgspec comes with the extra server"
    )
    stats = {name: 3 for name in requestlog._TIMES}
    calls = [
        requestlog.RecordedCall("generate", "demo", stats=stats),
        requestlog.RecordedCall("generate", "demo"),  # it failed
    ]
    path = log(tmp_path, request(1.0, 0.5, *(call.described() for call in calls)))
    assert read_log(path).generations == {LoggedGeneration(0, 3, 3): 1}


def test_bundles_of_a_server_are_not_mixed(tmp_path: Path) -> None:
    path = log(
        tmp_path, request(1.0, 0.5, generate("a")), request(2.0, 0.5, generate("b", new_tokens=9))
    )
    with pytest.raises(UsageError, match=r"one of the bundles of the log \(a, b\), found none"):
        read_log(path)
    found = read_log(path, "b")
    assert found.generations == {LoggedGeneration(20, 9): 1}
    assert found.seconds_at == {1: 0.5}
    with pytest.raises(UsageError, match="found 'c'"):
        read_log(path, "c")


def test_lines_of_the_user_are_json_or_csv(tmp_path: Path) -> None:
    rows = ['{"prompt_tokens": 7, "new_tokens": 3, "batch": 2}', "", '{"length": 12}']
    found = read_log(log(tmp_path, *rows))
    assert found.generations == {LoggedGeneration(7, 3, batch=2): 1}
    assert found.encodings == {LoggedEncoding(12): 1}
    table = log(tmp_path, "length, batch", "12, 4", "9,", name="log.csv")
    assert read_log(table).encodings == {LoggedEncoding(12, 4): 1, LoggedEncoding(9): 1}


WRONG = [
    ("{", "line 1: expected JSON"),
    ("[1]", "line 1: expected an object"),
    ('{"tokens": 3}', "line 1: expected prompt_tokens or length, found tokens"),
    ('{"length": 0}', "length: expected a number from 1 to"),
    ('{"prompt_tokens": 3}', "new_tokens: expected a number from 0 to 16777216, found None"),
    ('{"event": "request", "time": 1, "seconds": 1, "calls": [3]}', "of a server's log"),
    ('{"event": "start"}', "expected requests with lengths, found none"),
]


def test_a_log_of_another_form_or_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for line, problem in WRONG:
        with pytest.raises(UsageError, match=problem):
            read_log(log(tmp_path, line))
    with pytest.raises(StoreError, match=r"none\.jsonl: cannot read: No such file"):
        read_log(tmp_path / "none.jsonl")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(StoreError, match="not UTF-8"):
        read_log(tmp_path / "latin")
