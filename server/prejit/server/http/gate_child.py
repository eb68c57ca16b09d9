"""A process that loads a bundle and plays requests to it, one for each line of stdin.

    python -m prejit.server.http.gate_child BUNDLE NAME SEED MAX_TOKENS

Each line of stdout is JSON: first the bundle with its time to the first answer, or {"error": ..., "code":
...}; then for each line of a log on stdin what it gave, and for `null` the peak of its memory.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict
from typing import Any, cast

from prejit.runtime.base.child_process import end_with_parent, take_stdout, write_answer
from prejit.runtime.base.process_facts import seconds_since_exec
from prejit.runtime.base.process_memory import peak_memory_bytes
from prejit.runtime.errors import FallbackWarning, PrejitError
from prejit.runtime.loader import load
from prejit.server.engine.engine import Engine
from prejit.server.http.app import make_app
from prejit.server.releases.request_player import (
    UNLIMITED,
    PlayedRequest,
    RequestPlayer,
    own_requests,
)
from prejit.server.served.served import Models, Served
from prejit.server.telemetry.requestlog import record
from prejit.server.telemetry.watched_engine import WatchedEngine


def main(path: str, name: str, seed: str, max_tokens: str) -> None:
    """Play requests to a bundle until stdin ends."""
    end_with_parent()
    answers = take_stdout()
    loop = asyncio.new_event_loop()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)  # the answer says it
            bundle = load(path)
        # Every request computes its whole prompt: what one leaves in a cache would make the next one faster.
        engine = Engine(bundle, queue=UNLIMITED, prefix_memory=0)
        served = Served(
            name, bundle, cast("Engine", WatchedEngine(name, engine, record)), int(time.time())
        )
        player = RequestPlayer(make_app, Models(served), int(max_tokens) or None)
        own = own_requests(served, int(seed))
        if own:
            loop.run_until_complete(player.play(own[0]))
        else:
            bundle.finish()
            bundle.prepare()
        start_seconds = seconds_since_exec()
        bundle.finish()
        if bundle.matched:
            bundle.prepare()
        wrong = next(bundle.wrong_answers(), "") if bundle.matched else ""
    except PrejitError as error:
        write_answer(answers, {"error": str(error), "code": error.code})
        return
    programs = Counter(each.source for each in bundle.report())
    described = {
        "digest": bundle.digest,
        "target": bundle.target,
        "why_not": _why_compiles(served),
        "start_seconds": start_seconds,
        "programs": programs,
        "wrong": wrong,
        "own": own,
    }
    write_answer(answers, described)
    for text in sys.stdin:
        line = json.loads(text)
        if line is None:
            write_answer(answers, peak_memory_bytes())
        else:
            write_answer(answers, _described(loop.run_until_complete(player.play(line))))


def _described(played: PlayedRequest) -> dict[str, Any]:
    return {
        "status": played.entry.status,
        "calls": [asdict(each) for each in played.entry.calls],
        "said": played.said,
        "seconds": played.seconds,
        "cpu_seconds": played.cpu_seconds,
    }


def _why_compiles(served: Served) -> str:
    """Return why a bundle's programs are compiled here; empty: they are not."""
    bundle = served.bundle
    found = {each.target: each.reason() for each in bundle.verdicts}
    return "" if bundle.matched else found[bundle.target]


if __name__ == "__main__":
    main(*sys.argv[1:])
