"""Encoder-decoders from a checkpoint to text: bundles of T5 and Whisper say what torch says."""

import json

import numpy as np
import pytest
from tests.extent import sampled
from tests.manifests import write_manifest
from tests.parity import t5_cases, whisper_cases
from tests.parity.cases import cases as decoder_cases

from prejit.runtime import ContextError, UsageError, load
from prejit.server.engine.engine import Engine

T5, WHISPER = t5_cases.cases()[0], whisper_cases.cases()[0]


def built(at, run, case, source, context=(8, 28), status=0):
    name = case.config["model_type"]
    case.write(at / "model")
    # Nothing ends a text early: torch's record goes on after these tokens too.
    (at / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    sizes = {"batch": (2,), "prompt": (4,), "context": context}
    lines = {"model": 'dtype = "float32"', "generate": f"source = {source}\ndraft_tokens = 3"}
    write_manifest(at / "m.toml", "model", name=name, **sizes, **lines)
    said = run("build", at / "m.toml", "-o", at, status=status, quick=True)
    return at / name, said.stderr


@pytest.fixture(scope="module")
def translator(tmp_path_factory, run):
    path, _ = built(tmp_path_factory.mktemp("t5"), run, T5, [11, 23])
    return load(path, on_mismatch="error")


@pytest.fixture(scope="module")
def transcriber_dir(tmp_path_factory, run):
    at = tmp_path_factory.mktemp("whisper")
    return built(at, run, WHISPER, [WHISPER.frames], context=(28,))[0]


@pytest.fixture(scope="module")
def transcriber(transcriber_dir):
    return load(transcriber_dir, on_mismatch="error")


def recorded(case):
    """The greedy tokens of torch after each prompt, as far as the context of the bundle goes."""
    module = t5_cases if case is T5 else whisper_cases
    with np.load(module.REFERENCE) as reference:
        return reference[case.name].argmax(2)[:, :20].tolist()


def requests(case):
    rows = zip(case.prompt.tolist(), case.source, case.lengths, strict=True)
    return [(prompt, source[..., :length]) for prompt, source, length in rows]


@pytest.mark.parametrize(
    "case", sampled([T5, WHISPER], lambda case: case is WHISPER), ids=["t5", "whisper"]
)
def test_a_bundle_writes_what_torch_wrote(case, request):
    bundle = request.getfixturevalue("translator" if case is T5 else "transcriber")
    wanted, given, limit = recorded(case), requests(case), {"max_new_tokens": 20}
    for options in (limit, {**limit, "prompt_lookup": True}):
        found = [bundle.generate(prompt, source=source, **options) for prompt, source in given]
        assert [list(result.token_ids) for result in found] == wanted
    prompts, sources = zip(*given, strict=True)
    together = bundle.generate_batch(
        [*prompts, prompts[0]], sources=[*sources, sources[1]], **limit
    )
    assert [list(result.token_ids) for result in together[:2]] == wanted
    session = bundle.session()
    for prompt, source in (*given, given[0]):
        again = session.generate(prompt, source=source, **limit)
        assert again.stats.reused_tokens == 0
        assert list(again.token_ids) in wanted
    streamed = bundle.stream(prompts[0], source=sources[0], **limit)
    assert [piece.token_id for piece in streamed] == wanted[0]


@pytest.mark.thorough
def test_an_engine_reads_the_sources_of_many_callers(translator):
    """More than it has slots for: they join and leave beside each other."""
    engine = Engine(translator)
    futures = [
        engine.submit(prompt, source=source, max_new_tokens=5 + place)
        for place, (prompt, source) in enumerate(requests(T5) * 3)
    ]
    for place, (ids, future) in enumerate(zip(recorded(T5) * 3, futures, strict=True)):
        assert list(future.result(120).token_ids) == ids[: 5 + place]
    with pytest.raises(UsageError, match="source: expected what the model is to read, found none"):
        engine.submit([1])
    engine.close()


@pytest.mark.thorough
def test_a_text_begins_by_itself_and_a_source_may_be_short(translator):
    options = {"source": requests(T5)[0][1][:5], "max_new_tokens": 6}
    began = translator.generate(**options)
    started = translator.generate([T5.config["decoder_start_token_id"]], **options)
    assert began.token_ids == started.token_ids
    assert began.stats.programs[0].startswith("encode/b2-n11-")
    [one, two] = translator.generate_n(None, 2, **options, temperature=1.0)
    assert one.token_ids != two.token_ids


@pytest.mark.thorough
def test_a_wrong_source_is_told(translator, transcriber):
    wrong = [
        (translator, None, "source: expected what the model is to read, found none"),
        (translator, "a text", "no tokenizer"),
        (translator, [1, 2, 10**6], "source: expected .* 10000"),
        (translator, np.ones((2, 3), np.int32), r"expected int32\[N\], found int32\[2, 3\]"),
        (translator, np.ones(3, np.float32), r"expected int32\[N\], found float32\[3\]"),
        (translator, object(), "source: expected an array of numbers"),
        (translator, [1] * 24, "source: expected at most 23 places, found 24"),
        (transcriber, np.ones((1, 2), np.float32), r", N\], found float32\[1, 2\]"),
    ]
    for bundle, source, said in wrong:
        with pytest.raises((UsageError, ContextError), match=said):
            bundle.generate([1], source=source)
    with pytest.raises(UsageError, match="no common prefix"):
        translator.prefix([1, 2])


def test_the_command_line_reads_a_spectrogram(transcriber_dir, tmp_path, run):
    prompt, source = requests(WHISPER)[0]
    np.save(tmp_path / "sound.npy", source)
    said = run(
        *("generate", transcriber_dir, "--prompt-ids", ",".join(map(str, prompt))),
        *("--source", tmp_path / "sound.npy", "--max-new-tokens", "5", "--json"),
    )
    assert json.loads(said.stdout)["token_ids"] == recorded(WHISPER)[0][:5]
    assert "encode/b2" in said.stdout


def test_a_source_for_a_model_that_reads_none_is_told(tmp_path, run):
    plain = decoder_cases()[0]
    _, said = built(tmp_path, run, plain, [8], status=2)
    assert "generate.source: expected none" in said


@pytest.mark.thorough
def test_profile_gives_it_a_source_and_bench_refuses_it(transcriber_dir, run):
    assert "encode/b2-n" in run("profile", transcriber_dir, "--seconds", "0.1").stdout
    said = run("bench", transcriber_dir, status=2).stderr
    assert "expected a model that continues prompts, found one that reads a source" in said
