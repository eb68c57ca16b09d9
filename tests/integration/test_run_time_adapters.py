"""Adapters: merged by a build, or beside the weights, where each row has its own."""

import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.decoders import write_random
from tests.integration.test_serve import Process, over
from tests.layouts import GOLDEN
from tests.lettered import write_lettered
from tests.manifests import write_manifest
from tests.parity.adapter_cases import CASES, REFERENCE, write_adapter
from tests.signers import key_table, signer, write_policy

import prejit.compiler
from prejit.compiler.progress import Quiet
from prejit.compiler.rebuilding.build_record import read_recorded
from prejit.compiler.rebuilding.rebuilt import rebuild
from prejit.compiler.signing.bundle_signing import sign_adapter
from prejit.runtime import load
from prejit.runtime.errors import (
    BuildError,
    CheckpointError,
    ManifestError,
    UntrustedError,
    UntrustedWarning,
    UsageError,
)
from prejit.server import Engine
from prejit.server.served.bundle_swaps import BundleSwaps
from prejit.server.served.served import CanaryShare, Models, Served

BUCKETS = {"batch": (1, 8), "prompt": (10,), "context": (48,)}
SLOTS, RANK = 8, 5
SIZES = {
    **{"attn.c_attn": (24, 72), "attn.c_proj": (24, 24)},
    **{"mlp.c_fc": (24, 96), "mlp.c_proj": (96, 24)},
}
CONFIG = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "use_rslora": True}
CONFIG["target_modules"] = [*SIZES]
OPTIONS = {"max_new_tokens": 12, "logprobs": 3, "stop_token_ids": ()}
PROMPTS = [[place + 1, 7, 11, 3 * place, 5] for place in range(8)]


def write(at, seed, config=CONFIG, sizes=SIZES):
    """An adapter of the GPT-2; the matrices of its layers may have other ranks."""
    shapes = {}
    for layer, (name, (inputs, outputs)) in itertools.product(range(2), sizes.items()):
        module, rank = f"transformer.h.{layer}.{name}", config["r"]
        for pattern, other in config.get("rank_pattern", {}).items():
            rank = other if module.endswith(pattern) else rank
        start = f"base_model.model.{module}.lora_"
        shapes |= {f"{start}A.weight": (rank, inputs), f"{start}B.weight": (outputs, rank)}
    write_adapter(at, config, shapes, seed)
    return at


def patterned(number):
    """Configurations that differ in all that decides ranks and factors."""
    more = {"rank_pattern": {"h.1.mlp.c_fc": 5}, "alpha_pattern": {"c_proj": 2.5}}
    return CONFIG | (more if number % 2 else {"use_rslora": False, "r": 1 + number % 3})


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    at = tmp_path_factory.mktemp("adapters")
    return [write(at / str(number), number, patterned(number)) for number in range(SLOTS + 1)]


@pytest.fixture(scope="module")
def path(make_decoder):
    return make_decoder("gpt2", **BUCKETS, adapters=(SLOTS, RANK))


@pytest.fixture
def bundle(path):
    with load(path, on_mismatch="error") as bundle:
        yield bundle


def said(result):
    return result.token_ids, [(each.logprob, each.top) for each in result.logprobs]


def run(bundle, requests):
    """What requests give that share one batch: tokens and their log-probabilities."""
    batch = bundle.batch(SLOTS)
    found = {slot: ([], []) for slot in batch.insert(*requests)}
    while tokens := batch.step():
        for token in tokens:
            if token.token_id is not None:
                found[token.slot][0].append(token.token_id)
                found[token.slot][1].append((token.logprob.logprob, token.logprob.top))
    return [(tuple(ids), likely) for ids, likely in found.values()]


def difference(one, other):
    return max(abs(a[0] - b[0]) for a, b in zip(one[1], other[1], strict=True))


def test_an_adapter_gives_the_logits_of_peft(tmp_path, make_decoder):
    case = CASES[3]  # LoRA of all matrices, those of several projections in one included
    with np.load(REFERENCE) as recorded:
        expected = recorded[case.name]
    [adapter] = case.write(tmp_path)
    sizes = {"batch": (1,), "prompt": (16,), "context": (24,), "draft_tokens": 0}
    built = make_decoder(tmp_path / "base", **sizes, adapters=(2, 4))
    with load(built, on_mismatch="error") as bundle:
        bundle.adapters.load("peft", adapter)
        for step, logits in enumerate(expected):
            prompt = [*case.base.prompt.tolist(), *case.following[:step].tolist()]
            options = {"max_new_tokens": 1, "logprobs": 20, "adapter": "peft"}
            [likely] = bundle.generate(prompt, **options).logprobs
            wanted = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            assert max(abs(wanted[token] - found) for token, found in likely.top) <= 1e-4


@pytest.mark.thorough
def test_rows_of_one_batch_have_each_their_own_adapter_or_none(
    bundle, directories, make_decoder, build_cache, tmp_path
):
    for number in range(SLOTS):
        bundle.adapters.load(f"a{number}", directories[number])
    given = [(prompt, {**OPTIONS, "adapter": f"a{n}"}) for n, prompt in enumerate(PROMPTS)]
    requests = [bundle.request(prompt, **options) for prompt, options in given]
    together, alone = run(bundle, requests), [run(bundle, [each])[0] for each in requests]
    assert max(map(difference, together, alone)) < 1e-5
    for (prompt, options), (ids, _), (others, _) in zip(given, alone, together, strict=True):
        assert ids == others == bundle.generate(prompt, prompt_lookup=True, **options).token_ids
    with load(make_decoder("gpt2", **BUCKETS), on_mismatch="error") as plain:
        without = run(plain, [plain.request(prompt, **OPTIONS) for prompt in PROMPTS])
        bare = said(plain.generate(PROMPTS[0], **OPTIONS))
    assert said(bundle.generate(PROMPTS[0], **OPTIONS)) == bare
    none = [bundle.request(prompt, **OPTIONS) for prompt in PROMPTS]
    assert run(bundle, none) == without
    mixed = run(bundle, [*none[:3], *requests[3:6], *none[6:]])
    assert [*mixed[:3], *mixed[6:]] == [*without[:3], *without[6:]]  # to the bit
    assert [ids for ids, _ in mixed[3:6]] == [ids for ids, _ in alone[3:6]]
    assert all(ids != other for (ids, _), (other, _) in zip(alone, without, strict=True))
    write_random("gpt2", tmp_path / "gpt2")
    lines = f"accuracy = false\nadapters = [{json.dumps(str(directories[1]))}]"
    sizes = {"batch": (1, 8), "prompt": (10,), "context": (48,), "generate": "draft_tokens = 3"}
    manifest = write_manifest(tmp_path / "merged.toml", "gpt2", model=lines, **sizes)
    options = {"cache": build_cache, "measure": False, "quiet": True}
    built = prejit.compiler.build(manifest, tmp_path, **options)
    with load(built.path, on_mismatch="error") as merged:
        found = said(merged.generate(PROMPTS[1], **OPTIONS))
    assert found[0] == alone[1][0]
    assert difference(found, alone[1]) <= 1e-4


def changed(at, **config):
    return write(at, 1, CONFIG | config)


def with_weights(at, change):
    """Write an adapter, and change its arrays."""
    file = write(at, 1) / "adapter_model.safetensors"
    save_file({name: change(value) for name, value in load_file(file).items()}, file)
    return at


def cut(at):
    file = write(at, 1) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    return at


def of_embedding(at):
    name = "base_model.model.transformer.wte.lora_A.weight"
    write_adapter(at, CONFIG | {"target_modules": ["wte"]}, {name: (3, 48)}, 1)
    return at


REFUSED = {
    "dora": (lambda at: changed(at, use_dora=True), "config.json: use_dora: expected false"),
    "biases": (lambda at: changed(at, bias="all"), "config.json: bias: expected none"),
    "saved": (lambda at: changed(at, modules_to_save=["ln_f"]), "modules_to_save: expected none"),
    "rank": (lambda at: changed(at, r=6), r"r: expected at most 5, \[adapters\] rank of"),
    "shapes": (
        lambda at: write(at, 1, sizes=SIZES | {"mlp.c_fc": (24, 90)}),
        r"c_fc with lora_A \[3, 24\], lora_B \[90, 3\], expected lora_A \[3, 24\], lora_B \[96, 3\]",
    ),
    "target": (of_embedding, "transformer.wte, which is no matrix that the bundle lets"),
    "not named": (lambda at: changed(at, target_modules=["c_fc"]), "which target_modules of"),
    "integers": (
        lambda at: with_weights(at, lambda value: value.astype(np.int32)),
        "lora_A.weight: expected float32, .*; found int32",
    ),
    "not finite": (
        lambda at: with_weights(at, lambda value: value * np.float32(np.nan)),
        "expected finite numbers, found others in",
    ),
    "cut": (cut, "its bytes are not inside the file"),
    "nothing": (lambda at: at, "adapter_config.json: expected a file, found none"),
}


HINTS = {
    "rank": "build with rank = 6 in [adapters], or merge it",
    "target": 'build with targets = ["c_attn", "c_fc", "c_proj", "wte"] in [adapters], or list it in [model]',
    "shapes": "give one for [adapters], or list it in [model] adapters",
}


@pytest.mark.thorough
def test_what_does_not_fit_is_refused_with_its_file_and_loads_nothing(bundle, tmp_path):
    for name, (make, problem) in REFUSED.items():
        at = tmp_path / name
        at.mkdir()
        with pytest.raises(CheckpointError, match=problem) as caught:
            bundle.adapters.load("a", make(at))
        assert str(at) in str(caught.value)
        assert HINTS.get(name, "") in (caught.value.hint or "")
    assert not bundle.adapters.loaded
    with pytest.raises(UsageError, match="adapter: expected one that is loaded: none; found 'a'"):
        bundle.generate([1], adapter="a")
    with pytest.raises(UsageError, match="adapter: expected a name of letters"):
        bundle.adapters.load("a:b", write(tmp_path / "good", 1))


@pytest.mark.thorough
def test_a_slot_is_free_after_the_last_request_that_uses_its_adapter(bundle, path, directories):
    adapters = bundle.adapters
    for number in range(SLOTS):
        adapters.load(f"a{number}", directories[number])
    assert adapters.load("a0", directories[0]) is adapters.loaded["a0"]
    with pytest.raises(UsageError, match="adapter 'a0': expected sha256"):
        adapters.load("a0", directories[1])
    expected = bundle.generate(PROMPTS[0], adapter="a1", **OPTIONS).token_ids
    stream = bundle.stream(PROMPTS[0], adapter="a1", **OPTIONS)
    tokens = [next(stream).token_id]
    adapters.unload("a1")
    with pytest.raises(UsageError, match=r"found 'a1', did you mean 'a0'\?|found 'a1'"):
        bundle.generate(PROMPTS[0], adapter="a1")
    with pytest.raises(UsageError, match="expected a free slot for an adapter, found 8 taken"):
        adapters.load("b", directories[SLOTS])
    assert (*tokens, *(each.token_id for each in stream)) == expected
    del stream
    adapters.load("b", directories[SLOTS])  # of smaller ranks than the one before
    slot = adapters.loaded["b"].slot
    found = bundle.generate(PROMPTS[0], adapter="b", **OPTIONS).token_ids
    with load(path, on_mismatch="error") as alone:
        alone.adapters.load("b", directories[SLOTS])
        assert slot != alone.adapters.loaded["b"].slot
        assert found == alone.generate(PROMPTS[0], adapter="b", **OPTIONS).token_ids


@pytest.mark.thorough
def test_an_unloaded_or_foreign_adapter_is_refused(bundle, path, directories, decoder_dir):
    given = bundle.adapters.load("a", directories[0])
    request = bundle.request(PROMPTS[0], adapter=given, **OPTIONS)
    with load(path, on_mismatch="error") as other:
        other.adapters.load("a", directories[1])
        with pytest.raises(UsageError, match="adapter 'a': expected one of this bundle"):
            other.batch(1).insert(request)
        with pytest.raises(UsageError, match=r"adapter 'a': expected sha256:.* of another bundle"):
            other.generate(PROMPTS[0], adapter=given)
    with load(decoder_dir, on_mismatch="error") as plain:
        uses = (lambda: plain.batch(1).insert(request), lambda: plain.generate([1], adapter="a"))
        for use in uses:
            with pytest.raises(UsageError, match="expected a bundle that takes adapters"):
                use()
    bundle.adapters.unload("a")
    assert run(bundle, [request])  # it keeps its slot
    bundle.adapters.load("a", directories[1])
    with pytest.raises(UsageError, match=r"adapter 'a': expected sha256:.* which is unloaded"):
        bundle.generate(PROMPTS[0], adapter=given)


@pytest.mark.thorough
def test_no_prompt_begins_with_what_another_adapter_has_computed(bundle, directories):
    for name in ("a0", "a1"):
        bundle.adapters.load(name, directories[int(name[1])])
    prompt, options = [*range(1, 41)], {**OPTIONS, "max_new_tokens": 4}
    with pytest.raises(UsageError, match="prefix: expected none beside an adapter"):
        bundle.generate(prompt, adapter="a0", prefix=bundle.prefix(prompt[:20]))
    ways = [{"adapter": "a0"}, {}, {"adapter": "a1"}]
    alone = [bundle.generate(prompt, **way, **options).token_ids for way in ways]
    assert len({*alone}) == 3
    # What copies share is computed once.
    copies = bundle.generate_n(prompt, 3, adapter="a1", **options)
    assert {each.token_ids for each in copies} == {alone[2]}
    engine = Engine(bundle)
    for turn in range(2):
        for way, expected in zip(ways, alone, strict=True):
            result = engine.generate(prompt, **way, **options)
            assert result.token_ids == expected
            assert result.stats.reused_tokens == (39 if turn else 0)
    engine.close()


@pytest.mark.thorough
def test_a_tried_release_has_the_adapters_of_the_model_or_neither_has(bundle, path, directories):
    with load(path, on_mismatch="error") as tried:
        before, after = Served("m", bundle, None, 0), Served("m", tried, None, 0, path="next")
        models = Models(before)
        swaps = BundleSwaps(models, None, 1.0)

        def loaded():
            return [sorted(each.adapters.loaded) for each in (bundle, tried)]

        swaps.load_adapter("m", "a0", str(directories[0]))
        tried.adapters.load("dropped", directories[1])  # while the release was loaded and tried
        tried.adapters.load("a0", directories[2])
        swaps.share("m", CanaryShare(after, 0.5))
        assert loaded() == [["a0"]] * 2
        assert tried.adapters["a0"].digest == bundle.adapters["a0"].digest
        swaps.load_adapter("m", "a1", str(directories[1]))
        assert loaded() == [["a0", "a1"]] * 2
        swaps.unload_adapter("m", "a0")
        assert loaded() == [["a1"]] * 2
        for number in range(1, SLOTS):
            tried.adapters.load(f"more{number}", directories[number])
        too = r"release next, which a canary tries, takes too: .* slot"
        with pytest.raises(UsageError, match=too):
            swaps.load_adapter("m", "a0", str(directories[0]))
        assert loaded()[0] == ["a1"]


@pytest.mark.thorough
def test_a_policy_lets_only_signed_adapters_be_loaded(path, tmp_path, directories):
    rule = '[[rules]]\nnames = ["*"]\nlevel = "audit"\nkeys = ["release"]'
    policy = write_policy(tmp_path / "trust.toml", key_table("release"), rule)
    adapter = write(tmp_path / "adapter", 1)
    with pytest.warns(UntrustedWarning, match="reports about target"):
        bundle = load(path, trust=policy)
    with bundle:
        policy.write_text(policy.read_text().replace("audit", "strict"))
        with pytest.raises(UntrustedError, match=r"does not let the adapter .*\(unsigned\)"):
            bundle.adapters.load("a", adapter)
        for _ in range(2):  # the second time adds nothing
            sign_adapter(adapter, signer("release"))
        assert len((adapter / "adapter.sig").read_bytes().splitlines()) == 1
        assert bundle.adapters.load("a", adapter).slot
        write(adapter, 2)
        with pytest.raises(UntrustedError, match="other-subject"):
            bundle.adapters.load("b", adapter)


@pytest.fixture(scope="module")
def texts(make_decoder, tmp_path_factory):
    """One that takes adapters, one with other weights, one that takes none; with a tokenizer."""
    sizes = {"batch": (1, 8), "prompt": (8,), "context": (24,), "draft_tokens": 0}
    sources = [
        write_lettered(tmp_path_factory.mktemp("model") / name, layer_norm_epsilon=epsilon)
        for name, epsilon in (("a", 1e-5), ("b", 1e-5))
    ]
    weights = sources[1] / "model.safetensors"
    values = load_file(weights)
    save_file({name: value * np.float32(1.01) for name, value in values.items()}, weights)
    taking = [make_decoder(each, **sizes, adapters=(SLOTS, RANK)) for each in sources]
    return [*taking, make_decoder(sources[0], **sizes)]


@pytest.mark.thorough
def test_a_server_loads_and_drops_adapters_while_others_run(texts, directories, tmp_path, request):
    path, other, plain = texts
    ways = {"m": {}, "m:a0": {"adapter": "a0"}, "m:a1": {"adapter": "a1"}}

    def answers_of(at):
        with load(at, on_mismatch="error") as bundle:
            for name in ("a0", "a1"):
                bundle.adapters.load(name, directories[int(name[1])])
            options = {"max_new_tokens": 12, "stop_token_ids": (), "temperature": 0}
            answers = (bundle.generate("abc", **way, **options) for way in ways.values())
            return dict(zip(ways, (each.text for each in answers), strict=True))

    expected = answers_of(path)
    assert len({*expected.values()}) == 3
    at = str(tmp_path / "admin")
    own = shutil.copytree(directories[0], tmp_path / "own")
    arguments = (f"m={path}", "--adapter", f"a0={own}", "--admin", at)
    server = Process(*arguments).wait_until_ready()
    admin = over(at)
    request.addfinalizer(admin.close)
    request.addfinalizer(server.kill)

    def ask(model):
        body = {"model": model, "prompt": "abc", "max_tokens": 12, "temperature": 0}
        url = f"{server.url}/v1/completions"
        return httpx.post(url, json=body | {"ignore_eos": True}, timeout=60)

    def text(model):
        return ask(model).json()["choices"][0]["text"]

    def change(what, **body):
        return admin.post(f"/v1/{what}_lora_adapter", json=body, timeout=60)

    for name, model in (("m", "m"), ("m:a0", "m:a0"), ("a0", "m:a0")):
        assert text(name) == expected[model]
    # Log-probabilities of a prompt are those of the adapter.
    with load(path, on_mismatch="error") as bundle:
        bundle.adapters.load("a0", own)
        known = bundle.generate([5], adapter="a0", **OPTIONS)
    body = {"prompt": [5, *known.token_ids], "echo": True, "logprobs": 1, "max_tokens": 0}
    url = f"{server.url}/v1/completions"
    echoed = httpx.post(url, json=body | {"model": "m:a0"}, timeout=60).json()
    found = echoed["choices"][0]["logprobs"]["token_logprobs"]
    assert found[1:] == pytest.approx([each.logprob for each in known.logprobs], abs=1e-5)
    assert ask("m:a1").status_code == 404
    for place in ("", "/" + "a" * 5000):
        refused = change("load", lora_name="a1", lora_path=place)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
    taken = change("load", lora_name="m", lora_path=str(directories[1]))
    assert taken.status_code == 409
    assert "expected a name that no model has, found 'm'" in taken.text
    loaded = change("load", lora_name="a1", lora_path=str(directories[1]))
    assert (loaded.status_code, loaded.json()["model"]) == (200, "m:a1")
    assert change("load", lora_name="a1", lora_path=str(directories[2])).status_code == 409
    with ThreadPoolExecutor(12) as pool:
        asked = [*ways] * 8
        answers = [pool.submit(ask, each) for each in asked]
        unloaded = pool.submit(change, "unload", lora_name="a1").result()
        for name, answer in zip(asked, answers, strict=True):
            found = answer.result()
            if name != "m:a1" or found.status_code == 200:
                assert found.json()["choices"][0]["text"] == expected[name]
            else:
                assert found.status_code in (400, 404)
    assert unloaded.status_code == 200
    assert change("unload", lora_name="a1").status_code == 409
    models = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [(each["id"], each.get("parent")) for each in models] == [("m", None), ("m:a0", "m")]
    assert httpx.get(f"{server.url}/v1/models/m:a0").json() == models[1]
    page = httpx.get(f"{server.url}/metrics").text
    assert 'prejit_adapter_requests_total{adapter="a0",model_name="m"}' in page
    # A swap takes the adapters along, or leaves all as it was.
    for wrong in (plain, GOLDEN / "call"):
        refused = admin.post("/swap", json={"bundle": str(wrong)}, timeout=60)
        assert refused.status_code == 409
        assert "expected a bundle that takes adapters" in refused.text
    assert text("m:a0") == expected["m:a0"]
    write(own, 7)
    refused = admin.post("/swap", json={"bundle": str(other)}, timeout=60)
    assert (refused.status_code, str(own) in refused.text) == (409, True)
    shutil.copytree(directories[0], own, dirs_exist_ok=True)
    assert admin.post("/swap", json={"bundle": str(other)}, timeout=60).status_code == 200
    assert text("m:a0") == answers_of(other)["m:a0"]
    assert server.end() == 0


ATTENTION = "base_model.model.transformer.h.0.attn.c_attn"
ATTENTION_SHAPES = {f"{ATTENTION}.lora_A.weight": (2, 24), f"{ATTENTION}.lora_B.weight": (72, 2)}
MERGED = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["c_attn"]}


@pytest.mark.thorough
def test_other_adapters_are_other_weights_in_the_same_programs(build_cache, tmp_path):
    write_random("gpt2", tmp_path / "gpt2")
    adapted = 'adapters = ["sql"]\ndtype = "int8"'
    sizes = {"prompt": (8,), "context": (24,)}
    manifest = write_manifest(tmp_path / "m.toml", "gpt2", model=adapted, **sizes)
    options = {"cache": build_cache, "measure": False, "quiet": True}
    with pytest.raises(ManifestError, match=r"model\.adapters\[0\]: expected a directory"):
        prejit.compiler.plan(manifest, cache=build_cache)
    write_adapter(tmp_path / "sql", MERGED, ATTENTION_SHAPES, 1)
    first = prejit.compiler.build(manifest, tmp_path / "first", **options)
    recorded = read_recorded(first.path)
    sources = {(each.base, each.name) for each in recorded.sources}
    assert {
        *(("manifest", "sql/adapter_config.json"), ("manifest", "sql/adapter_model.safetensors")),
        ("model", "model.safetensors"),
    } <= sources
    file = tmp_path / "sql" / "adapter_model.safetensors"
    save_file({name: value * np.float32(2) for name, value in load_file(file).items()}, file)
    with pytest.raises(BuildError, match=r"sql/adapter_model\.safetensors: expected sha256:"):
        rebuild(first.path, manifest, progress=Quiet(), workers=1)
    second = prejit.compiler.build(manifest, tmp_path / "second", **options)
    assert (second.digest != first.digest, second.compiled) == (True, 0)
