"""What the page shows of the served bundles: their properties, and the figures of their engines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prejit.server.inference.inference_models import functions_of, static_values
from prejit.server.openai.tokens import longest

if TYPE_CHECKING:
    from prejit.runtime.format.constants import Constant
    from prejit.server.engine.engine_metrics import EngineMetrics, RequestMetrics
    from prejit.server.engine.histograms import HistogramValue
    from prejit.server.served.served import Models, Served


@dataclass(frozen=True, slots=True)
class ProgramState:
    """How one program became ready: see `ProgramReport`."""

    program: str
    source: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PageModel:
    """A served bundle.

    Attributes:
        name: its name at this server.
        bundle: its own name.
        digest: of the bundle.
        target: the target whose programs it has.
        matched: whether this machine matches that target; if not, programs are compiled here.
        versions: of the packages that built it.
        load_seconds: how long it took to load.
        chat, complete, embed: whether the page can do that with it.
        max_tokens: the longest context or sentence; None: it takes no tokens.
        calls: its functions. The Open Inference Protocol has them as NAME.FUNCTION.
        static: for each function, the values of each static argument.
        programs: how each program became ready.
    """

    name: str
    bundle: str
    digest: str
    target: str
    matched: bool
    versions: dict[str, str]
    load_seconds: float
    chat: bool
    complete: bool
    embed: bool
    max_tokens: int | None
    calls: tuple[str, ...]
    static: dict[str, dict[str, list[Constant]]]
    programs: tuple[ProgramState, ...]


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """Figures of the encodings, or of the calls of one function, as the page draws them."""

    program: str
    finished: int
    failed: int
    whole_p50: float | None
    whole_p95: float | None
    queue_p95: float | None
    rows_per_run: float | None
    padding: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one engine, as the page draws them. Times are in seconds; None: there was no value yet."""

    running: int
    waiting: int
    slots: int | None
    queue_size: int
    generation_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    kv_cache_usage: float
    cache_bytes: int | None
    host_memory_bytes: int
    device_memory_bytes: int | None
    first_token_p50: float | None
    first_token_p95: float | None
    inter_token_p50: float | None
    inter_token_p95: float | None
    whole_p50: float | None
    whole_p95: float | None
    queue_p95: float | None
    finished: int
    failed: int
    waited_for_compile: int
    programs: dict[str, int]
    calls: tuple[RequestFigures, ...]


def models_of(models: Models) -> list[PageModel]:
    """Return the served bundles."""
    return [_model(one) for one in models]


def figures_of(models: Models) -> dict[str, Figures]:
    """Return the figures of every engine, by the name of its bundle."""
    return {one.name: _figures(one.engine.metrics()) for one in models}


def _model(one: Served) -> PageModel:
    bundle = one.bundle
    functions = functions_of(bundle.config)
    has_decoder = bundle.config.decoder is not None and bundle.config.decoder.source is None
    return PageModel(
        name=one.name,
        bundle=bundle.name,
        digest=bundle.digest,
        target=bundle.target,
        matched=bundle.matched,
        versions=dict(sorted(bundle.config.versions.items())),
        load_seconds=bundle.load_seconds,
        chat=has_decoder and bundle.has_tokenizer and bundle.has_chat_template,
        complete=has_decoder and bundle.has_tokenizer,
        embed=bundle.config.encoder is not None and bundle.has_tokenizer,
        max_tokens=longest(one) or None,
        calls=tuple(sorted(functions)),
        static={name: static_values(buckets) for name, buckets in functions.items()},
        programs=tuple(
            ProgramState(each.program, each.source, each.seconds) for each in bundle.report()
        ),
    )


def _figures(metrics: EngineMetrics) -> Figures:
    whole, queue = metrics.whole_seconds, metrics.queue_seconds
    return Figures(
        running=metrics.running,
        waiting=metrics.waiting,
        slots=metrics.slots,
        queue_size=sum(each.queue_size for each in metrics.requests),
        generation_tokens=metrics.generation_tokens,
        prompt_tokens=metrics.prompt_tokens,
        cached_prompt_tokens=metrics.cached_prompt_tokens,
        kv_cache_usage=metrics.kv_cache_usage,
        cache_bytes=metrics.cache_bytes,
        host_memory_bytes=metrics.host_memory_bytes,
        device_memory_bytes=metrics.device_memory_bytes,
        first_token_p50=_quantile(metrics.first_token_seconds, 0.5),
        first_token_p95=_quantile(metrics.first_token_seconds, 0.95),
        inter_token_p50=_quantile(metrics.inter_token_seconds, 0.5),
        inter_token_p95=_quantile(metrics.inter_token_seconds, 0.95),
        whole_p50=_quantile(whole, 0.5),
        whole_p95=_quantile(whole, 0.95),
        queue_p95=_quantile(queue, 0.95),
        finished=sum(each.succeeded for each in metrics.requests),
        failed=sum(each.failed for each in metrics.requests),
        waited_for_compile=sum(each.waited_for_compile for each in metrics.requests),
        programs=dict(metrics.programs),
        calls=tuple(_calls(each) for each in metrics.requests if each.kind != "generate"),
    )


def _calls(requests: RequestMetrics) -> RequestFigures:
    useful, computed = requests.useful_positions, requests.computed_positions
    if not computed:  # a function, which has no tokens
        useful, computed = requests.rows, requests.rows + requests.padded_rows
    return RequestFigures(
        program=requests.program,
        finished=requests.succeeded,
        failed=requests.failed,
        whole_p50=_quantile(requests.whole_seconds, 0.5),
        whole_p95=_quantile(requests.whole_seconds, 0.95),
        queue_p95=_quantile(requests.queue_seconds, 0.95),
        rows_per_run=requests.rows / requests.runs if requests.rows else None,
        padding=1 - useful / computed if computed else None,
    )


def _quantile(histogram: HistogramValue, share: float) -> float | None:
    value = histogram.quantile(share)
    return None if math.isnan(value) else value
