"""The main promise on a real model: a fresh process gives the published text, however it gets there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.extent import cases

from prejit.runtime import Fingerprint, Sampling, load
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import ContextError, FallbackWarning
from prejit.runtime.machine.fingerprint import CPU_FEATURES

from .conftest import Run, write_manifest

Stories = tuple[Path, dict[str, list[int]]]
V2_ONLY = (
    "64bit",
    "cmov",
    "crc32",
    "cx16",
    "cx8",
    "fxsr",
    "mmx",
    "popcnt",
    "sahf",
    "sse",
    "sse2",
    "sse3",
)

TARGETS = cases(["cpu-host", "cpu-x86-64-v3"], others=["cpu-x86-64-v2"])


@pytest.fixture(scope="module")
def bundles(
    run: Run, stories: Stories, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """One bundle for each target, all from one cache."""
    directory = tmp_path_factory.mktemp("stories")
    made = {}
    buckets = {"batch": (1, 4), "context": (64, 256)}
    for target in TARGETS:
        manifest = write_manifest(
            directory / f"{target}.toml",
            stories[0],
            name=target,
            targets=(target,),
            **(buckets if target == "cpu-host" else {}),
        )
        run("build", manifest, "-o", directory)
        made[target] = directory / target
    return made


def generate(run: Run, bundle: Path, stories: Stories, *arguments: str) -> dict[str, object]:
    expected = stories[1]
    prompt = ",".join(map(str, expected["prompt_ids"]))
    done = run(
        *("generate", bundle, "--prompt-ids", prompt, "--json"),
        *("--max-new-tokens", str(len(expected["ids"])), *arguments),
    )
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("target", TARGETS)
def test_fresh_process_writes_the_published_text(
    run: Run, bundles: dict[str, Path], stories: Stories, target: str
) -> None:
    result = generate(run, bundles[target], stories, "--on-mismatch", "error")
    assert result["token_ids"] == stories[1]["ids"]
    assert result["text"] == stories[1]["text"]
    assert result["finish_reason"] == "length"
    assert {p["source"] for p in result["programs"]} <= {"loaded", "unused"}  # type: ignore[attr-defined]


def test_fallback_writes_the_published_text_and_keeps_what_it_compiled(
    run: Run, bundles: dict[str, Path], stories: Stories, tmp_path: Path
) -> None:
    here = Fingerprint.current()
    old = Fingerprint(**{**_fields(here), "cpu_features": V2_ONLY})
    (tmp_path / "old.json").write_bytes(to_json(old))
    told = ("--fingerprint", str(tmp_path / "old.json"))
    first = generate(run, bundles["cpu-host"], stories, *told)
    second = generate(run, bundles["cpu-host"], stories, *told)
    for result, source in ((first, "compiled"), (second, "kept")):
        assert result["token_ids"] == stories[1]["ids"]
        assert result["matched"] is False
        assert {p["source"] for p in result["programs"]} == {source, "unused"}  # type: ignore[attr-defined]
    prompt = ("generate", bundles["cpu-host"], "--prompt-ids", "1", *told)
    refused = run(*prompt, "--on-mismatch", "error", status=3)
    assert "cpu_features" in refused.stderr
    assert "avx2" in refused.stderr


def test_any_split_between_prefill_and_decode_gives_the_same_tokens(
    bundles: dict[str, Path], stories: Stories
) -> None:
    bundle = load(bundles["cpu-host"])
    ids = [*stories[1]["prompt_ids"], *stories[1]["ids"]]
    # 3: within a bucket; 16 and 17: at its edge; 33 and 100: in chunks; 200: one token is left
    for split in (1, 3, 15, 16, 17, 33, 100, 200):
        result = bundle.generate(ids[:split], max_new_tokens=len(ids) - split)
        assert list(result.token_ids) == ids[split:], f"prefill of {split}"


def test_a_prompt_that_fills_the_context_to_its_end_is_not_shifted(
    bundles: dict[str, Path], stories: Stories
) -> None:
    bundle = load(bundles["cpu-host"])
    ids = [*stories[1]["prompt_ids"], *stories[1]["ids"]]
    # A context of 64: the last chunk of 63 tokens would run past its end if it were written whole.
    result = bundle.generate(ids[:63], max_new_tokens=2)
    assert list(result.token_ids) == ids[63:65]
    full = bundle.generate([*ids, *ids][:256])
    assert full.finish_reason == "context"
    assert len(full.token_ids) == 1
    with pytest.raises(ContextError, match="at most 256 tokens"):
        bundle.generate([1] * 257)


def test_rows_of_a_batch_do_not_disturb_each_other(
    bundles: dict[str, Path], stories: Stories
) -> None:
    bundle = load(bundles["cpu-host"])
    ids = [*stories[1]["prompt_ids"], *stories[1]["ids"]]
    prompts = [ids[:1], ids[:50], ids[:7]]
    results = bundle.generate_batch(prompts, max_new_tokens=40)
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == ids[len(prompt) : len(prompt) + 40]


def test_sampled_tokens_depend_on_the_seed_alone(bundles: dict[str, Path]) -> None:
    bundle = load(bundles["cpu-host"])
    options = {"temperature": 1.0, "top_k": 50, "top_p": 0.95}
    alone = [bundle.generate([1], max_new_tokens=30, seed=s, **options) for s in (1, 2, 2**63)]
    sampling = [Sampling(seed=s, **options) for s in (1, 2, 2**63)]
    together = bundle.generate_batch([[1]] * 3, max_new_tokens=30, sampling=sampling)
    assert [r.token_ids for r in alone] == [r.token_ids for r in together]
    assert len({r.token_ids for r in alone}) == 3
    split = bundle.generate([1, *alone[0].token_ids[:10]], max_new_tokens=20, seed=1, **options)
    assert split.token_ids == alone[0].token_ids[10:]


def test_a_stop_token_ends_the_text_and_is_not_in_it(
    bundles: dict[str, Path], stories: Stories
) -> None:
    bundle = load(bundles["cpu-host"])
    stop = stories[1]["ids"][20]
    first = stories[1]["ids"].index(stop)
    result = bundle.generate([1], max_new_tokens=100, stop_token_ids=[stop])
    assert result.finish_reason == "stop"
    assert list(result.token_ids) == stories[1]["ids"][:first]


def test_streamed_pieces_join_to_the_text_and_are_whole_characters(
    bundles: dict[str, Path], stories: Stories
) -> None:
    bundle = load(bundles["cpu-host"])
    pieces = list(bundle.stream([1], max_new_tokens=len(stories[1]["ids"])))
    assert "".join(piece.text for piece in pieces) == stories[1]["text"]
    assert [piece.token_id for piece in pieces] == stories[1]["ids"]
    assert [p.finish_reason for p in pieces if p.finish_reason] == ["length"]


def test_a_machine_that_does_not_match_is_told_why(
    bundles: dict[str, Path], stories: Stories
) -> None:
    """By each axis; what they fall back to is the same."""
    for axis, other in (
        ("platform", "cuda"),
        ("architecture", "aarch64"),
        ("cpu_features", V2_ONLY),
        ("jaxlib", "0.4.0"),
    ):
        machine = Fingerprint(**{**_fields(Fingerprint.current()), axis: other})
        with pytest.warns(FallbackWarning, match=f"{axis}: needs"):
            bundle = load(bundles["cpu-host"], fingerprint=machine)
    assert list(bundle.generate([1], max_new_tokens=5).token_ids) == stories[1]["ids"][:5]
    assert {report.source for report in bundle.report()} == {"compiled", "unused"}


def _fields(machine: Fingerprint) -> dict[str, object]:
    assert set(machine.cpu_features) <= set(CPU_FEATURES)
    return {name: getattr(machine, name) for name in Fingerprint.__dataclass_fields__}


def test_a_process_that_ends_with_its_last_token_ends_cleanly(
    run: Run, bundles: dict[str, Path]
) -> None:
    # XLA's threads drop the last references while the interpreter shuts down: see Device.put.
    for _ in range(3):
        done = run("generate", bundles["cpu-host"], "--prompt-ids", "1", "--max-new-tokens", "20")
        assert done.stderr == ""
