"""`prejit profile`: where the time of a token goes, of a bundle or of a running server."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prejit.runtime.base.files import store_errors
from prejit.runtime.base.process_facts import importing
from prejit.runtime.base.wording import shortened, table
from prejit.runtime.cli.command_options import (
    DIR,
    JSON,
    PATH,
    Number,
    load_bundle,
    loads,
    local_bundle,
    output,
)
from prejit.runtime.cli.output import print_json, print_text, progress
from prejit.runtime.errors import NetworkError

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.server.engine.engine import Engine
    from prejit.server.telemetry.profile_time_line import TimeLine, Total

_SHOWN = 12
"""Programs and kernels that the tables show; --json has all."""
_PLACE_CHARACTERS = 50
_PROMPT_TOKENS, _NEW_TOKENS = 32, 64
"""The requests that a bundle runs, if its context has room for them."""


@click.command(
    epilog="Examples:\n\n\b\n  prejit profile artifacts/demo -o trace.json.gz\n"
    "  prejit profile http://127.0.0.1:9090 --seconds 5 -o trace.json.gz\n\n"
    "Open the file at https://ui.perfetto.dev."
)
@click.argument(
    "place",
    type=PATH,
    metavar="BUNDLE|URL",
    help="A bundle, which this process runs; or the admin address of a server (`prejit serve --admin`), "
    "http:// or unix:PATH, which is recorded as it runs.",
)
@click.option(
    "--seconds",
    type=Number(0.01, 60),
    default=2.0,
    metavar="SECONDS",
    help="Length of the recording.",
)
@output("FILE.json.gz", "Write the time line, for Perfetto.")
@click.option(
    "--xprof", **DIR, help="Write XLA's own profile below DIR, for xprof and TensorBoard."
)
@loads
@JSON
def profile(
    place: str, seconds: float, output: str | None, xprof: str | None, as_json: bool, **loading: Any
) -> int:
    """Record where the time goes: by request, step, program and kernel."""
    with importing():
        from prejit.server.telemetry.engine_profile import read_recording
        from prejit.server.telemetry.profile_time_line import read_time_line, trace_events

    with progress() as show:
        if place.startswith(("http://", "https://", "unix:")):
            show(f"the server records for {seconds:g} s")
            content = _of_server(place, seconds)
        else:
            content = _of_bundle(place, seconds, show, **loading)
        show("reading the recording")
        try:
            xspace, spans = read_recording(content)
        except ValueError as error:
            raise NetworkError(
                f"{place}: expected a recording, found {len(content)} bytes that are none: {error}",
                hint="give the admin address of a server of this version of prejit",
            ) from error
        found = read_time_line(xspace, spans)
    if as_json:
        totals = {name: [asdict(each) for each in getattr(found, name)] for name in _TABLES}
        print_json({"seconds": found.seconds, "tokens": found.tokens, **totals})
    else:
        print_text(_text(found))
    if output is not None:
        text = json.dumps(trace_events(found)).encode()
        with store_errors(output, "write"):
            Path(output).write_bytes(gzip.compress(text) if output.endswith(".gz") else text)
    if xprof is not None:
        with store_errors(xprof, "write"):
            _write_xprof(Path(xprof), xspace)
    return 0


_TABLES = ("programs", "kernels")


def _of_server(url: str, seconds: float) -> bytes:
    """Ask a server at its admin address to record itself; return the recording."""
    from prejit.server.load.http_client import Exchange, HttpClient
    from prejit.server.load.workload import LoadRequest

    body = json.dumps({"seconds": seconds}).encode()
    request = LoadRequest("/profile", body, {"Content-Type": "application/json"}, False)

    async def asked() -> Exchange:
        client = HttpClient(url)
        try:
            return await client.exchange_within(request, seconds + 120)
        finally:
            client.close()

    found = asyncio.run(asked())
    if found.failed:
        raise NetworkError(
            f"{url}: cannot ask the server: {found.failed}",
            hint="give the address that `prejit serve --admin` printed at its start",
        )
    if found.status != 200:
        raise NetworkError(
            f"{url}: expected a recording, found status {found.status}: {_message(found.body)}",
            hint="/profile is at the admin address (`prejit serve --admin`), never at the public one"
            if found.status in (404, 405)
            else None,
        )
    return found.body


def _message(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return repr(content[:200])


def _of_bundle(path: str, seconds: float, show: Callable[[str], None], **loading: Any) -> bytes:
    """Run a bundle in this process and record it."""
    with importing():
        from prejit.server.engine.engine import Engine
        from prejit.server.telemetry.engine_profile import record

    with ExitStack() as stack:
        bundle = stack.enter_context(load_bundle(local_bundle(path, every=False), **loading))
        engine = Engine(bundle)
        stack.callback(engine.close)
        work = _work(bundle, engine)
        show("running once, to make programs ready")
        work()

        def until_the_end() -> None:
            end = time.perf_counter() + seconds
            show(f"recording for {seconds:g} s")
            while time.perf_counter() < end:
                work()

        return record([(bundle.name, bundle, engine)], until_the_end)


def _work(bundle: Bundle, engine: Engine) -> Callable[[], object]:
    """Return what a bundle does again and again: as many requests as run together, or all calls."""
    import numpy as np

    from prejit.runtime.device.transfer import aligned_zeros, dtype_of

    if bundle.config.decoder is not None:
        context, vocabulary = bundle.decoder.contexts[-1], bundle.decoder.decoder.vocab_size
        length = min(_PROMPT_TOKENS, max(1, context // 4))
        new = max(1, min(_NEW_TOKENS, context - length))
        order = random.Random(0)  # noqa: S311 (no secret)
        source = None
        if (read := bundle.decoder.source) is not None:
            longest = max(
                p.bucket["source"] for p in bundle.decoder.entries() if p.kind == "encode"
            )
            source = np.zeros(read.shape_at({"source": longest})[1:], dtype_of(read.dtype))

        def generate() -> object:
            waiting = []
            for _ in range(max(bundle.decoder.batches)):
                prompt = order.choices(range(vocabulary), k=length)  # no prefix is known
                waiting.append(
                    engine.submit(prompt, source=source, max_new_tokens=new, stop_token_ids=())
                )
            return [each.result() for each in waiting]

        return generate
    if bundle.config.encoder is not None:
        end = bundle.config.encoder.vocab_size - 1  # CLIP needs it
        count = min(32, bundle.encoder.max_tokens)
        words = "a " * (count // 4)
        scores = bundle.config.encoder.scores is not None  # which takes pairs of texts
        sentence = (words, words) if scores else [*[1] * (count - 1), end]
        return lambda: engine.submit_encode([sentence] * 4).result()
    programs = bundle.user_programs.programs
    calls = [
        (
            each.function,
            {
                a.path: aligned_zeros(a.shape, dtype_of(a.dtype))
                for a in programs.arguments(each.name)
            },
            programs.static(each.name),
        )
        for each in bundle.config.programs
    ]
    return lambda: [bundle.call_by_path(*call) for call in calls]


def _write_xprof(directory: Path, xspace: bytes) -> None:
    """Write an XSpace where xprof and TensorBoard's profile plugin look for one."""
    run = directory / "plugins" / "profile" / time.strftime("%Y_%m_%d_%H_%M_%S")
    os.makedirs(run, exist_ok=True)
    (run / f"{socket.gethostname()}.xplane.pb").write_bytes(xspace)


def _text(found: TimeLine) -> str:
    """Return how long it took, and the longest programs and kernels as tables."""
    head = f"recorded {found.seconds:.2f} s"
    if not found.programs and not found.kernels:
        return f"{head}: no program ran. Send requests meanwhile, or record longer: --seconds"
    if found.tokens:
        rate, each = found.tokens / found.seconds, found.seconds / found.tokens
        head += f": {found.tokens} new tokens, {rate:.0f} a second, {each * 1e3:.3g} ms each"
    programs = table(
        ["program", "runs", "seconds", "of the time", "a run"],
        [(each.program, *_numbers(each)) for each in found.programs[:_SHOWN]],
    )
    kernels = table(
        ["kernel", "of program", "place", "runs", "seconds", "of all kernels", "a run"],
        [
            (each.kernel, each.program, _shown(each.place), *_numbers(each))
            for each in found.kernels[:_SHOWN]
        ],
    )
    return f"{head}\n\n{programs}\n\n{kernels}"


def _shown(place: str) -> str:
    """Return the end of an operation's name, which says most."""
    return shortened(place[::-1], _PLACE_CHARACTERS)[::-1]


def _numbers(total: Total) -> Sequence[str]:
    run = total.seconds / total.runs
    return str(total.runs), f"{total.seconds:.3f}", f"{total.share:.1%}", f"{run * 1e6:,.1f} us"
