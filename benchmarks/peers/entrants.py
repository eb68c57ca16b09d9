"""The rows of a comparison: prejit and what a user would otherwise pick, each with its process.

An entrant is prepared when its row is first needed: its environment, its model in its own format, its bundle.
If that fails, the reason stands in the row's place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness import peer_environments, workload
from benchmarks.harness.family_models import FAMILY_MODELS
from benchmarks.harness.fresh_processes import (
    BENCHMARKS,
    FailedProcessError,
    Row,
    progress,
    run_once,
)
from benchmarks.harness.report import JAX_COLD, JAX_WARM
from benchmarks.harness.workspace import Bench

PREJIT = {dtype: f"prejit {dtype}" for dtype in workload.BYTES}


@dataclass(frozen=True)
class Work:
    """The work of a section, which every entrant does.

    Attributes:
        job: `generate` (64 tokens out), `prefill` (a prompt, again and again) or `encode`.
        model: `gpt2`, `llama-1b`, `minilm`, or a name in family_models.py.
        batch: number of rows that run together.
        dtypes: dtypes of the weights that are compared.
        tokens: length of the prompts.
        engines: beginnings of the names of those that take part; empty: all.
    """

    job: str
    model: str
    batch: int = 1
    dtypes: tuple[str, ...] = tuple(workload.BYTES)
    tokens: int = workload.PROMPT_TOKENS
    engines: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """Options of the child process: the batch and the tokens of a prompt; an encoder has none."""
        return () if self.job == "encode" else (str(self.batch), str(self.tokens))


Command = tuple[str, ...]
Prepare = Callable[[Bench, Work], tuple[Command, Mapping[str, str]]]
"""A function that returns the command of an entrant's process and its environment variables."""


@dataclass(frozen=True)
class Entrant:
    """An engine with one dtype: one row of the tables.

    Attributes:
        name: name of the row.
        dtype: dtype of its stored weights.
        prepare: function that makes what it needs and returns its command.
        can: jobs and models that it takes part in.
        quick: whether it is in the quick form.
        environment: name of its environment; empty: the benchmark's own.
        packages: packages whose versions are reported.
        one_row: reason why it takes part with batch 1 only; empty: it takes part with every batch.
    """

    name: str
    dtype: str
    prepare: Prepare
    can: frozenset[tuple[str, str]]
    quick: bool = False
    environment: str = ""
    packages: tuple[str, ...] = ()
    one_row: str = ""


def prejit(bench: Bench, work: Work, dtype: str) -> tuple[Command, Mapping[str, str]]:
    """Return prejit's process, on a bundle with the programs that the work needs."""
    if work.job == "encode":
        path = encoder_bundle(bench, dtype)
        return ("peers/encode_child.py", "bundle", path), bench.prejit
    sizes = workload.FEW
    name = f"{work.model}-{dtype}"
    if work.tokens != workload.PROMPT_TOKENS:
        contexts: tuple[int, ...] = (work.tokens + 2 * workload.NEW_TOKENS,)
        if work.model != "gpt2" and contexts[0] in workload.LONG_CONTEXTS:
            contexts = workload.LONG_CONTEXTS
        sizes = {"batch": (1,), "prompt": (workload.CHUNK_TOKENS,), "context": contexts}
        name += f"-context-{contexts[-1]}"
    elif work.batch > 1:
        sizes, name = {**sizes, "batch": workload.BATCHES}, f"{name}-batches"
    path = bench.built(name, work.model, dtype, sizes)
    return ("peers/prejit_child.py", work.job, path, *work.options), bench.prejit


def encoder_bundle(bench: Bench, dtype: str) -> str:
    """Return the bundle of the encoder."""
    bench.model("minilm")
    name = f"encoder-{dtype}"
    shapes = [list(shape) for shape in workload.ENCODER_SHAPES]
    return bench.built_manifest(
        name,
        f'[bundle]\nname = "{name}"\n\n[model]\nsource = "minilm"\ndtype = "{dtype}"\n'
        "accuracy = false\n\n"  # all matrices in the dtype, as those of peers
        f'[encode]\nshapes = {shapes}\n\n[[target]]\nname = "cpu-host"\n',
    )


def jax(bench: Bench, work: Work, warm: bool, *options: str) -> tuple[Command, Mapping[str, str]]:
    """Return the process of plain JAX, in prejit's own environment."""
    environment = bench.warm if warm else {}
    if work.job == "encode":
        return ("peers/encode_child.py", "jax", str(bench.model("minilm"))), environment
    bench.model("gpt2")
    return ("peers/jax_baseline.py", work.job, bench.weights, *work.options, *options), environment


def jax_bfloat16(bench: Bench, work: Work) -> tuple[Command, Mapping[str, str]]:
    """Return the process of plain JAX with matrices in bfloat16."""
    return jax(bench, work, True, "--bfloat16")


def llama_cpp(
    bench: Bench, work: Work, kind: str, environment: str
) -> tuple[Command, Mapping[str, str]]:
    """Return the process of a Python binding of llama.cpp or of its fork."""
    python = peer_environments.interpreter(bench.directory, environment)
    path = gguf_file(bench, work.model, kind, python)
    return child(python, "peers/llama_cpp_child.py", work, path), {}


def gguf_file(bench: Bench, model: str, kind: str, python: str) -> str:
    """Return the path of a model as a GGUF file; write it if it is missing.

    Args:
        bench: directory of the benchmark.
        model: name of the model.
        kind: kind of its weights in gguf_file.py.
        python: an interpreter with the package gguf.
    """
    source = bench.model(model)
    path = bench.directory / f"{model}-{kind}.gguf"
    if kind == "q4_k_m":
        source = Path(gguf_file(bench, model, "bf16", python))
    if not path.is_file():
        progress(f"writing {path.name}")
        converter = str(BENCHMARKS / "peers/convert/gguf_file.py")
        run_once(Row(path.name, (python, converter, str(source), str(path), kind)))
    return str(path)


def onnxruntime(bench: Bench, work: Work, kind: str) -> tuple[Command, Mapping[str, str]]:
    """Return the process of ONNX Runtime on optimum's export; int8 is its dynamic quantization."""
    python = peer_environments.interpreter(bench.directory, "onnxruntime")
    path = exported(bench, work, "onnx", TASKS[work.job])
    if kind != "float32":
        path = exported(bench, work, f"onnx-{kind}", source=path)
    return child(python, "peers/onnxruntime_child.py", work, path), {}


def ctranslate2(bench: Bench, work: Work, kind: str) -> tuple[Command, Mapping[str, str]]:
    """Return the process of CTranslate2 on its own conversion."""
    python = peer_environments.interpreter(bench.directory, "ctranslate2")
    return child(
        python, "peers/ctranslate2_child.py", work, exported(bench, work, "ctranslate2", kind)
    ), {}


def openvino(
    bench: Bench, work: Work, weights: str, precision: str
) -> tuple[Command, Mapping[str, str]]:
    """Return the process of OpenVINO on optimum-intel's export, with a warm cache of compiled models."""
    python = peer_environments.interpreter(bench.directory, "openvino")
    path = exported(bench, work, "openvino", TASKS[work.job], weights)
    return child(python, "peers/openvino_child.py", work, path, precision), {}


def torch_compile(bench: Bench, work: Work, dtype: str) -> tuple[Command, Mapping[str, str]]:
    """Return the process of transformers and torch.compile, with a warm cache of compiled code."""
    python = peer_environments.interpreter(bench.directory, "torch")
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(bench.directory / "inductor-cache")}
    path = str(bench.model(work.model))
    return child(python, "peers/torch_child.py", work, path, dtype), environment


TASKS = {
    "generate": "text-generation-with-past",
    "prefill": "text-generation-with-past",
    "encode": "feature-extraction",
}
"""Names of the tasks in optimum."""


def exported(bench: Bench, work: Work, form: str, *options: str, source: str = "") -> str:
    """Return the path of a model in a peer's format; write it if it is missing.

    Args:
        bench: directory of the benchmark.
        work: work whose model is exported.
        form: format of export_model.py.
        *options: options of that format. The last one is part of the name, unless it is a task.
        source: another export that this one is made from.

    Returns:
        Its directory.
    """
    name = f"{work.model}-{form}"
    if options and options[-1] not in TASKS.values():
        name += f"-{options[-1]}"
    path = bench.directory / "exports" / name
    if not path.is_dir():
        where = "export-openvino" if form == "openvino" else "export-onnx"
        python = peer_environments.interpreter(bench.directory, where)
        path.parent.mkdir(exist_ok=True)
        given = source or str(bench.model(work.model))
        script = str(BENCHMARKS / "peers/convert/export_model.py")
        progress(f"exporting {name}")
        run_once(Row(name, (python, script, form, given, str(path), *options)))
    return str(path)


def child(python: str, script: str, work: Work, path: str, *more: str) -> Command:
    """Return the command of a peer's child process."""
    return (python, str(BENCHMARKS / script), work.job, path, *more, *work.options)


def _texts(*models: str) -> frozenset[tuple[str, str]]:
    return frozenset((job, model) for job in ("generate", "prefill") for model in models)


_GPT2 = _texts("gpt2")
_LLAMA = _texts("llama-1b", "llama-3b")
_QWEN = _texts("qwen3-600m")
_FAMILIES = _LLAMA | _texts(*FAMILY_MODELS)
_MINILM = frozenset({("encode", "minilm")})

ENTRANTS = (
    *(
        Entrant(PREJIT[dtype], dtype, partial(prejit, dtype=dtype), can, quick=True)
        for dtype, can in (
            ("float32", _GPT2 | _MINILM),
            ("bfloat16", _GPT2 | _FAMILIES | _MINILM),
            ("int8", _GPT2 | _FAMILIES | _MINILM),
            ("int4", _GPT2 | _FAMILIES),
        )
    ),
    Entrant(JAX_COLD, "float32", partial(jax, warm=False), _GPT2 | _MINILM, quick=True),
    Entrant(JAX_WARM, "float32", partial(jax, warm=True), _GPT2 | _MINILM, quick=True),
    *(
        Entrant(
            f"llama.cpp {kind}",
            dtype,
            partial(llama_cpp, kind=kind, environment="llama.cpp"),
            can,
            True,
            "llama.cpp",
            ("llama-cpp-python",),
        )
        for kind, dtype, can in (
            ("f32", "float32", _GPT2),
            ("bf16", "bfloat16", _GPT2 | _FAMILIES),
            ("q8_0", "int8", _GPT2 | _FAMILIES),
            ("q4_0", "int4", _GPT2 | _FAMILIES),
            ("q4_k_m", "int4", _GPT2 | _LLAMA | _QWEN),
        )
    ),
    *(
        Entrant(
            f"ik_llama.cpp {kind}",
            dtype,
            partial(llama_cpp, kind=kind, environment="ik_llama.cpp"),
            _texts("llama-1b") | _QWEN,  # it refuses GPT-2's shared output weights
            environment="ik_llama.cpp",
            packages=("ik-llama-cpp-python",),
            one_row="it aborts in batches",
        )
        for kind, dtype in (("bf16", "bfloat16"), ("q8_0", "int8"), ("q4_0", "int4"))
    ),
    *(
        Entrant(
            f"OpenVINO {name}",
            dtype,
            partial(openvino, weights=weights, precision=precision),
            can,
            environment="openvino",
            packages=("openvino", "openvino-genai"),
            one_row="its pipeline does not tell when a step of several rows is done",
        )
        for name, dtype, weights, precision, can in (
            ("fp32", "float32", "fp32", "f32", _GPT2 | _MINILM),
            ("bf16 arithmetic", "bfloat16", "fp32", "bf16", _GPT2 | _MINILM),
            ("int8", "int8", "int8", "f32", _GPT2 | _LLAMA | _QWEN | _MINILM),
            ("int4", "int4", "int4", "f32", _GPT2 | _LLAMA | _QWEN),
        )
    ),
    *(
        Entrant(
            f"ONNX Runtime {name}",
            dtype,
            partial(onnxruntime, kind=dtype),
            can,
            environment="onnxruntime",
            packages=("onnxruntime",),
        )
        for name, dtype, can in (
            ("fp32", "float32", _GPT2 | _MINILM),
            ("int8", "int8", _GPT2 | _MINILM),
            ("int4", "int4", _GPT2),
        )
    ),
    *(
        Entrant(
            f"CTranslate2 {dtype}",
            dtype,
            partial(ctranslate2, kind=dtype),
            _GPT2 | _MINILM,
            environment="ctranslate2",
            packages=("ctranslate2",),
        )
        for dtype in ("float32", "int8")
    ),
    *(
        Entrant(
            f"torch.compile {dtype}",
            dtype,
            partial(torch_compile, dtype=dtype),
            frozenset({("generate", "gpt2")}),
            environment="torch",
            packages=("torch", "transformers"),
        )
        for dtype in ("float32", "bfloat16")
    ),
    Entrant("JAX bfloat16, persistent cache", "bfloat16", jax_bfloat16, _GPT2),
)


def rows(bench: Bench, work: Work, wanted: str, failures: dict[str, str]) -> list[Row]:
    """Return the rows of a section, with models and bundles prepared.

    Args:
        bench: directory, and whether the form is the quick one.
        work: work of the section.
        wanted: parts of the names of rows to run, with commas; empty: all.
        failures: receives the reason by name for each row that cannot be prepared.
    """
    made = []
    for entrant in ENTRANTS:
        if (work.job, work.model) not in entrant.can or entrant.dtype not in work.dtypes:
            continue
        if work.engines and not entrant.name.startswith(work.engines):
            continue
        if bench.quick and not entrant.quick:
            continue
        if not any(part in entrant.name.lower() for part in wanted.lower().split(",")):
            continue
        if work.batch > 1 and entrant.one_row:
            failures[entrant.name] = entrant.one_row
            continue
        try:
            command, environment = entrant.prepare(bench, work)
        except (FailedProcessError, peer_environments.EnvironmentFailedError) as error:
            failures[entrant.name] = str(error).removeprefix(f"{entrant.name}: ")
            progress(f"left out: {entrant.name}: {error}")
        else:
            made.append(Row(entrant.name, command, environment, entrant.dtype))
    return made


def versions(bench: Bench, names: Collection[str]) -> dict[str, str]:
    """Return the package versions of the entrants that took part."""
    found: dict[str, str] = {}
    for entrant in ENTRANTS:
        if entrant.environment and entrant.name in names:
            python = bench.directory / "envs" / entrant.environment / "bin" / "python"
            found |= peer_environments.package_versions(str(python), entrant.packages)
    return found
