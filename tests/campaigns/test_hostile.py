"""Random configuration of a careless or hostile user leads to a clear error or a right result."""

import json
from random import Random

import pytest
from tests.manifests import encoder_manifest, write_manifest
from tests.quick_compiling import compile_children_quickly
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..parity import cases, encoder_cases, t5_cases
from . import junk, processes
from .campaign import Findings, check, facts, scratch_directory, setting, write_figures
from .junk import edited, nasty, to_json, to_toml

WHOLE_EXAMPLES = 125  # configurations of each of the four kinds that `make hostile` tries
EXAMPLES = setting("HOSTILE_EXAMPLES", 3)
pytestmark = pytest.mark.timeout(900 + 60 * EXAMPLES)
LIMIT_SECONDS = 10 if EXAMPLES >= WHOLE_EXAMPLES else 60
"""`make test` may share its machine with other work."""
LIMIT_BYTES = 1 << 30
DOCUMENTED = frozenset((0, 1, 2, 3, 4, 6, 7, 8))
"""Exit statuses of the command line, without 9, which only `bench` has."""


class Campaign(Findings):
    def __init__(self):
        super().__init__()
        self.slowest = {}
        self.growth = {}

    def explore(self, draw, attempt):
        """Try EXAMPLES configurations, the same ones each time in `make test`; fail if one ended badly."""
        before = len(self.failures)
        for number in range(EXAMPLES):
            seed = f"{draw.__name__} {number}" if EXAMPLES < WHOLE_EXAMPLES else None
            with scratch_directory() as directory:
                attempt(directory, draw(Random(seed)))
        check(self.failures[before:])

    def run(self, kind, function, argument, directory, configuration):
        """Run a function in a process. Returns its outcome; None: it did not what it should."""
        outcome = processes.run(function, argument, directory, limit_seconds=LIMIT_SECONDS)
        status = "time limit" if outcome.status is None else f"exit {outcome.status}"
        self.add(kind, status)
        self.slowest[kind] = max(self.slowest.get(kind, 0), outcome.seconds)
        self.growth[kind] = max(self.growth.get(kind, 0), outcome.growth_bytes)
        problem = None
        if outcome.status is None:
            problem = f"no end after {LIMIT_SECONDS} s"
        elif outcome.status not in DOCUMENTED:
            problem = f"exit status {outcome.status} is not documented"
        elif "Traceback" in outcome.stderr:
            problem = "a traceback"
        elif outcome.growth_bytes >= LIMIT_BYTES:
            problem = f"grew by {outcome.growth_bytes >> 20} MB"
        if problem is None:
            return outcome
        self.spoil(kind, problem, outcome, configuration)
        return None

    def spoil(self, kind, problem, outcome, configuration):
        said = (outcome.stdout[-500:] + outcome.stderr[-1500:]).strip()
        self.fail(kind, f"{problem}\n{str(configuration)[:3000]}\n{said}")

    def build_and_run(self, kind, directory, drawn, function, command):
        build = ("build", "m.toml", "-o", "out", "--no-measure")
        built = self.run(kind, _main, build, directory, drawn)
        if built is None or built.status != 0:
            if built is not None and "error[" not in built.stderr:
                self.spoil(kind, "no error was printed", built, drawn)
            return
        ran = self.run(f"{kind}, run", function, command, directory, drawn)
        if ran is not None and ran.status != 0:
            self.spoil(kind, "built, but does not run", ran, drawn)
        elif ran is not None and ("NaN" in ran.stdout or "Infinity" in ran.stdout):
            self.spoil(kind, "built, but its results are not finite", ran, drawn)


@pytest.fixture(scope="module")
def campaign(build_cache, tmp_path_factory):
    """The campaign of this run, with a build cache that holds the native kernels."""
    caches = tmp_path_factory.mktemp("caches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREJIT_CACHE", str(build_cache))
        patch.setenv("PREJIT_RUNTIME_CACHE", str(caches / "runtime"))
        warm = _write_model(caches / "warm", "gpt2")
        with (warm / "m.toml").open("a") as manifest:
            manifest.write('[[target]]\nname = "cpu-x86-64-v3"\n')
        _built(warm)
        made = Campaign()
        yield made
    if EXAMPLES >= WHOLE_EXAMPLES:
        kinds = {
            kind: {
                "outcomes": outcomes,
                "slowest_seconds": round(made.slowest[kind], 1),
                "largest_growth_mb": made.growth[kind] >> 20,
            }
            for kind, outcomes in sorted(made.figures().items())
        }
        found = {"configurations": 4 * EXAMPLES, "limit_seconds": LIMIT_SECONDS}
        found |= {"bad_outcomes": len(made.failures), "kinds": kinds}
        write_figures("hostile", facts("jax") | found)


_CASES = {case.config["model_type"]: case for case in reversed(cases.cases())}
_DECODERS = frozenset(_CASES)
for _case in reversed(encoder_cases.cases()):
    _CASES[("sentence-" if _case.pooling else "") + _case.config["model_type"]] = _case
_CASES["t5"] = t5_cases.cases()[0]
_OPTIONAL = (
    *("head_dim", "rope_scaling", "rope_theta", "sliding_window", "layer_types", "hidden_act"),
    *("tie_word_embeddings", "max_position_embeddings", "num_key_value_heads", "torch_dtype"),
    *("partial_rotary_factor", "final_logit_softcapping", "eos_token_id", "unknown"),
    *("num_decoder_layers", "decoder_start_token_id", "dense_act_fn", "scale_decoder_outputs"),
)


def _write_model(directory, family, dtype="float32"):
    """Write a family's checkpoint and the manifest m.toml that builds it."""
    _CASES[family].write(directory / "model")
    manifest, model = directory / "m.toml", f'dtype = "{dtype}"'
    if family in _DECODERS or family == "t5":
        sizes = {"prompt": (8,), "context": (32,)}
        more = "source = [8]" if family == "t5" else ""
        write_manifest(manifest, "model", name="m", **sizes, model=model, generate=more)
    else:
        encoder_manifest(manifest, "shapes = [[1, 8]]", model=model)
    return directory


def _built(directory):
    built = processes.run(_main, ("build", "m.toml", "-o", "out"), directory, limit_seconds=300)
    assert built.status == 0, built.stderr
    return directory / "out" / "m"


def _main(arguments):
    from prejit.runtime.__main__ import main

    if arguments[0] == "build" and EXAMPLES < WHOLE_EXAMPLES:
        compile_children_quickly()
        arguments = (*arguments, "--jobs", "1")
    return main(arguments)


def _model_configs(random):
    family = random.choice([*_CASES])
    dtype = random.choice(("float32", "bfloat16", "int8"))
    config = _CASES[family].config
    if random.random() < 0.1:
        return family, dtype, junk.damaged(to_json(config).encode(), random)
    return family, dtype, to_json(edited(config, random, _OPTIONAL)).encode()


def _generate_command(*prompt):
    options = ("--max-new-tokens", "4", "--logprobs", "1", "--json", "--on-mismatch", "error")
    return ("generate", "out/m", *prompt, *options)


def _use(kind):
    """Print what the command line does not take token ids for: an embedding, or a text about a source."""
    from prejit.runtime import load

    bundle = load("out/m", on_mismatch="error")
    if kind == "encode":
        print(json.dumps(bundle.encode([[1, 2, 3]]).tolist()))
    else:
        result = bundle.generate([0], source=[1, 2, 3], max_new_tokens=4, logprobs=1)
        print(json.dumps([(one.token_id, one.logprob) for one in result.logprobs or ()]))
    return 0


@pytest.mark.thorough
def test_any_config_json_is_refused_or_makes_a_bundle_that_runs(campaign):
    def attempt(directory, drawn):
        family, dtype, config = drawn
        _write_model(directory, family, dtype)
        (directory / "model" / "config.json").write_bytes(config)
        use = (_use, "read" if family == "t5" else "encode")
        if family in _DECODERS:
            use = (_main, _generate_command("--prompt-ids", "1,2"))
        campaign.build_and_run("config.json", directory, drawn, *use)

    campaign.explore(_model_configs, attempt)


def _tokenizers():
    """Return tokenizer.json of the four kinds of models; their token ids are below 29."""
    words = ["[UNK]", "<s>", "</s>", *"abcdefghijklmnopqrst", " ", "th", "he"]
    vocabulary = {word: place for place, word in enumerate(words)}
    unknown = {"unk_token": "[UNK]"}
    found = []
    for model in (
        models.WordLevel(vocabulary, **unknown),
        models.BPE(vocabulary, [("t", "h"), ("h", "e")], **unknown),
        models.WordPiece(vocabulary, **unknown),
        models.Unigram([(word, -float(place)) for place, word in enumerate(words)], 0),
    ):
        tokenizer = Tokenizer(model)
        tokenizer.add_special_tokens(["<s>"])
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        pattern = Regex(r"\s+|\w+|[^\s\w]+")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
        tokenizer.decoder = decoders.Fuse()
        found.append(json.loads(tokenizer.to_str()))
    return found


_BESIDE = {
    "tokenizer_config.json": {
        **{"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True},
        **{"add_eos_token": False, "bos_token": "<s>", "eos_token": "</s>"},
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        "model_max_length": 64,
    },
    "generation_config.json": {
        **{"bos_token_id": 1, "eos_token_id": [2], "do_sample": True, "temperature": 0.7},
        **{"top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 8},
    },
    "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
}


def _tokenizer_files(random):
    """Draw tokenizer.json and the files beside it, one or two of them damaged."""
    trees = {"tokenizer.json": random.choice(_tokenizers()), **_BESIDE}
    files = {name: to_json(tree).encode() for name, tree in trees.items()}
    chosen = random.choices(["tokenizer.json", *files], k=random.randrange(1, 3))
    for name in dict.fromkeys(chosen):
        if random.random() < 0.2:
            files[name] = junk.damaged(files[name], random)
        else:
            more = ("chat_template", "added_tokens", "pre_tokenizer")
            files[name] = to_json(edited(trees[name], random, more)).encode()
    return files


@pytest.mark.thorough
def test_any_tokenizer_is_refused_or_makes_a_bundle_that_takes_text(campaign):
    def attempt(directory, files):
        _write_model(directory, "gpt2")
        for file, content in files.items():
            (directory / "model" / file).write_bytes(content)
        command = _generate_command("--prompt", "the cat: é")
        campaign.build_and_run("tokenizer", directory, files, _main, command)

    campaign.explore(_tokenizer_files, attempt)


_MANIFEST = {
    "bundle": {"name": "m"},
    "model": {"source": "model", "dtype": "float32"},
    "generate": {
        **{"batch": [1], "prompt": [8], "context": [32]},
        **{"draft_tokens": 2, "cache_dtype": "float32"},
    },
    "program": [
        {
            **{"name": "f", "function": "user:f", "buckets": {"n": [1, 2]}},
            "args": {"x": "float32[{n}, 4]", "y": ["int32[]", "bool[{n}]"]},
        }
    ],
    "target": [{"name": "cpu-host"}, {"name": "cpu-x86-64-v3"}],
}


def _manifests(random):
    tree = edited(_MANIFEST, random)
    lines = (f"{json.dumps(name)} = {to_toml(value)}" for name, value in tree.items())
    content = "\n".join(lines).encode()
    return junk.damaged(content, random) if random.random() < 0.1 else content


@pytest.mark.thorough
def test_any_manifest_is_refused_or_builds(campaign):
    def attempt(directory, manifest):
        _write_model(directory, "gpt2")
        (directory / "m.toml").write_bytes(manifest)
        (directory / "user.py").write_text("def f(x, y):\n    return x.sum() + y[0]\n")
        for command in (("plan",), ("build", "-o", "out", "--no-measure")):
            kind = f"manifest, {command[0]}"
            campaign.run(kind, _main, (*command, "m.toml"), directory, manifest)

    campaign.explore(_manifests, attempt)


_METHODS = {
    "generate": (
        *("prompt", "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop"),
        *("logprobs", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "stop_token_ids", "token_mask", "prompt_lookup", "prefix"),
    ),
    "generate_n": ("prompt", "n", "temperature", "seed", "max_new_tokens"),
    "generate_batch": ("prompts", "sampling", "max_new_tokens"),
    "stream": ("prompt", "max_new_tokens", "stop", "logprobs"),
    "prefix": ("prompt",),
    "batch": ("slots",),
    "request": ("prompt", "max_new_tokens", "top_k", "stop_token_ids"),
    "encode": ("sentences", "on_too_long"),
    "call": ("name", "x"),
    "apply_chat_template": ("messages", "template", "add_generation_prompt", "tools"),
}
"""Methods of Bundle and names of their arguments; the first is passed by position."""


def _calls(random):
    """Draw a method and its arguments, some of them junk."""
    method = random.choice([*_METHODS])
    _, *others = _METHODS[method]
    given = {name: nasty(random) for name in others if random.random() < 2 / len(others)}
    if "max_new_tokens" in others:
        given.setdefault("max_new_tokens", 3)
    if method == "generate_n":
        given.setdefault("n", 2)  # Python itself refuses a call without it
    numbers = (*range(29), *junk.NUMBERS, *junk.FLOATS)
    ids = random.choices(numbers, k=random.randrange(7))
    return method, [random.choice((nasty(random), ids, [1, 2], "abc"))], given


def test_any_argument_of_the_api_gives_a_result_or_an_error_of_prejit(campaign, tmp_path):
    directory = _write_model(tmp_path / "api", "gpt2")
    for name, tree in {"tokenizer.json": _tokenizers()[1], **_BESIDE}.items():
        (directory / "model" / name).write_text(json.dumps(tree))
    bundle = _built(directory)

    def attempt(directory, drawn):
        campaign.run("api", _call, (str(bundle), *drawn), directory, drawn)

    campaign.explore(_calls, attempt)


def _call(argument):
    from prejit.runtime import load
    from prejit.runtime.errors import PrejitError

    path, method, positional, named = argument
    bundle = load(path, on_mismatch="error")
    try:
        result = getattr(bundle, method)(*positional, **named)
        if method == "stream":
            list(result)
    except PrejitError as error:
        return error.exit_code
    return 0
