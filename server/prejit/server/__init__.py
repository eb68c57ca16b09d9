"""The server of prejit: one engine for many callers of a bundle, and HTTP in front of it.

    from prejit.runtime import load
    from prejit.server import Engine

    engine = Engine(load("artifacts/demo"))
    futures = [engine.submit(prompt, max_new_tokens=64) for prompt in prompts]

Names are imported when they are first used (PEP 562). It imports prejit.runtime, and not prejit.compiler.
The rooms, from the outside in:

    cli                     serve, replay, load, observe
    adapters                bundles inside Ray Serve, BentoML, MLServer, Triton
    http                    the process, its connections, the application, the page at /
    openai, inference       the two protocols
    gate                    what every request passes: keys, limits, hosts; errors as clients get them
    telemetry               metrics, dashboards, alerts and runbooks; spans, the log of requests
    served                  the bundles of a server, by name, and how they are loaded
    engine                  one batch for all callers; shared runs
    grammar                 token masks of schemas, expressions and tools
    load                    open-loop load, the saturation curve, its knee
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prejit.server.engine.engine import Engine
    from prejit.server.engine.engine_metrics import EngineMetrics
    from prejit.server.engine.stream import Stream
    from prejit.server.grammar.grammars import Grammars

_HOMES = {
    "Engine": "engine.engine",
    "EngineMetrics": "engine.engine_metrics",
    "Grammars": "grammar.grammars",
    "Stream": "engine.stream",
}

__all__ = ["Engine", "EngineMetrics", "Grammars", "Stream"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
