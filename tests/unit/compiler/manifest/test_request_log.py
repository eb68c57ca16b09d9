"""What a log says, and what is said of a log that cannot be read."""

import json

import pytest
from tests.manifests import write_manifest

from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.manifest.request_log import LoggedEncoding, LoggedGeneration, read_log
from prejit.runtime.errors import StoreError, UsageError


def log(tmp_path, *lines, name="log.jsonl"):
    path = tmp_path / name
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return path


def request(time, seconds, *calls):
    return {"event": "request", "time": time, "seconds": seconds, "calls": calls}


def generate(model="demo", **counts):
    return {"kind": "generate", "model": model, "prompt_tokens": 20, "new_tokens": 5, **counts}


def test_lengths_come_from_logs_of_a_server_or_the_user(tmp_path):
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
    rows = ['{"prompt_tokens": 7, "new_tokens": 3, "batch": 2}', "", '{"length": 12}']
    found = read_log(log(tmp_path, *rows))
    assert found.generations == {LoggedGeneration(7, 3, batch=2): 1}
    assert found.encodings == {LoggedEncoding(12): 1}
    table = log(tmp_path, "length, batch", "12, 4", "9,", name="log.csv")
    assert read_log(table).encodings == {LoggedEncoding(12, 4): 1, LoggedEncoding(9): 1}


def test_logs_of_several_bundles_or_another_form_are_named(tmp_path):
    one, other = generate("a"), generate("b", new_tokens=9)
    path = log(tmp_path, request(1.0, 0.5, one), request(2.0, 0.5, other))
    found = read_log(path, "b")
    assert found.generations == {LoggedGeneration(20, 9): 1}
    assert found.seconds_at == {1: 0.5}
    both = r"one of the bundles of the log \(a, b\), found none"
    for name, problem in ((None, both), ("c", "found 'c'")):
        with pytest.raises(UsageError, match=problem):
            read_log(path, name)
    for line, problem in (
        ("{", "line 1: expected JSON"),
        ("[1]", "line 1: expected an object"),
        ('{"tokens": 3}', "line 1: expected prompt_tokens or length, found tokens"),
        ('{"length": 0}', "length: expected a number from 1 to"),
        ('{"prompt_tokens": 3}', "new_tokens: expected a number from 0 to 16777216, found None"),
        ('{"event": "request", "time": 1, "seconds": 1, "calls": [3]}', "of a server's log"),
        ('{"event": "start"}', "expected requests with lengths, found none"),
    ):
        with pytest.raises(UsageError, match=problem):
            read_log(log(tmp_path, line))
    (tmp_path / "latin").write_bytes(b"\xff")
    for name, problem in (("none", "none: cannot read: No such file"), ("latin", "not UTF-8")):
        with pytest.raises(StoreError, match=problem):
            read_log(tmp_path / name)


def test_the_suggested_lines_can_be_pasted_into_the_manifest(tmp_path, said):
    lengths, sizes = tmp_path / "lengths.csv", {"prompt": (16, 64), "context": (64, 128)}
    targets = ("cpu-host", "cpu-x86-64-v3")
    manifest = write_manifest(tmp_path / "chat.toml", "model", targets=targets, **sizes)
    lengths.write_text("prompt_tokens,new_tokens\n" + "21,5\n" * 9 + "60,60\n")
    (tmp_path / "model").mkdir()
    printed = said("suggest", lengths, "--manifest", manifest)
    pasted = printed[printed.index("[generate]") :]
    before, _, rest = manifest.read_text().partition("[generate]")
    manifest.write_text(before + pasted + rest[rest.index("[[target]]") :])
    sizes = read_manifest(manifest).generate
    assert (sizes.batch, sizes.prompt, sizes.context) == ((1,), (24, 64), (32, 128))
    assert "the batches are those of today" in printed
