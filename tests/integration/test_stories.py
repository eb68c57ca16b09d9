"""The main promise on a real model: a fresh process gives the published text, however it gets there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.extent import cases

from prejit.runtime import Fingerprint, load
from prejit.runtime.base.typed_json import to_json

from .conftest import Run, write_manifest

Stories = tuple[Path, dict[str, list[int]]]
TARGETS = cases(["cpu-host", "cpu-x86-64-v3"], others=["cpu-x86-64-v2"])


@pytest.fixture(scope="module")
def bundles(
    run: Run, stories: Stories, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """One bundle for each target, all from one cache."""
    directory = tmp_path_factory.mktemp("stories")
    for target in TARGETS:
        path = directory / f"{target}.toml"
        run(
            "build",
            write_manifest(path, stories[0], name=target, targets=(target,)),
            "-o",
            directory,
        )
    return {target: directory / target for target in TARGETS}


def generate(run: Run, bundle: Path, stories: Stories, *arguments: str) -> dict[str, Any]:
    expected = stories[1]
    prompt = ",".join(map(str, expected["prompt_ids"]))
    done = run(
        *("generate", bundle, "--prompt-ids", prompt, "--json"),
        *("--max-new-tokens", str(len(expected["ids"])), *arguments),
    )
    # XLA's threads drop the last references while the interpreter shuts down: see Device.put.
    assert ("--fingerprint" in arguments) == bool(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("target", TARGETS)
def test_fresh_process_writes_the_published_text(
    run: Run, bundles: dict[str, Path], stories: Stories, target: str
) -> None:
    result = generate(run, bundles[target], stories, "--on-mismatch", "error")
    assert result["token_ids"] == stories[1]["ids"]
    assert result["text"] == stories[1]["text"]
    assert result["finish_reason"] == "length"
    assert {p["source"] for p in result["programs"]} <= {"loaded", "unused"}


def test_fallback_writes_the_published_text_and_keeps_what_it_compiled(
    run: Run, bundles: dict[str, Path], stories: Stories, tmp_path: Path
) -> None:
    old = dataclasses.replace(
        Fingerprint.current(), cpu_features=("cx16", "popcnt", "sse2", "sse3")
    )
    (tmp_path / "old.json").write_bytes(to_json(old))
    told = ("--fingerprint", str(tmp_path / "old.json"))
    first = generate(run, bundles["cpu-host"], stories, *told)
    second = generate(run, bundles["cpu-host"], stories, *told)
    for result, source in ((first, "compiled"), (second, "kept")):
        assert result["token_ids"] == stories[1]["ids"]
        assert result["matched"] is False
        assert {p["source"] for p in result["programs"]} == {source, "unused"}
    prompt = ("generate", bundles["cpu-host"], "--prompt-ids", "1", *told)
    refused = run(*prompt, "--on-mismatch", "error", status=3)
    assert "cpu_features" in refused.stderr
    assert "avx2" in refused.stderr


def test_streamed_pieces_join_to_the_text_and_are_whole_characters(
    bundles: dict[str, Path], stories: Stories
) -> None:
    bundle = load(bundles["cpu-host"])
    pieces = list(bundle.stream([1], max_new_tokens=len(stories[1]["ids"])))
    assert "".join(piece.text for piece in pieces) == stories[1]["text"]
    assert [piece.token_id for piece in pieces] == stories[1]["ids"]
    assert [p.finish_reason for p in pieces if p.finish_reason] == ["length"]
