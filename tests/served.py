"""Stand-ins for served bundles, whose metrics a test sets: a real engine reaches few of the states."""

from concurrent.futures import Future
from types import SimpleNamespace

from prejit.runtime.generation.finished_text import Result, Stats
from prejit.runtime.generation.generate import Piece
from prejit.runtime.programs.ready_programs import ProgramReport
from prejit.runtime.start_report import StartReport
from prejit.runtime.verdict import Axis, Verdict
from prejit.server.engine.request_recorder import ENCODE, GENERATE, Cost, Recorder
from prejit.server.engine.sleeper import Sleeper
from prejit.server.served.served import Served

DIGEST = "sha256:" + "5e" * 32


def stats(**changed):
    values = {
        **{"prompt_tokens": 5, "new_tokens": 3, "reused_tokens": 2, "queue_seconds": 0.1},
        **{"prefill_seconds": 0.02, "decode_seconds": 0.04, "first_token_seconds": 0.12},
        **{"tokens_per_second": 50.0, "passes": 2, "drafted_tokens": 0, "accepted_tokens": 0},
        **{"padding": 0.25, "programs": ("prefill_8x16", "decode_8x128"), "obtained": ()},
    }
    return Stats(**{**values, **changed})


def done(value):
    future = Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


class StandIn:
    """An engine that answers at once, and whose recorder a test writes."""

    def __init__(self, slots=8, queue=256):
        self.options = []
        self.result = None
        self.recorder = Recorder(slots, queue, (GENERATE, ENCODE))
        self.encodings = self.recorder.requests(*ENCODE)
        self.sleeper = Sleeper("stand-in", 0, None, self.recorder.live)
        self.state = {
            **{"kv_cache_usage": 0.25, "cache_bytes": 1000, "cache_budget_bytes": 4000},
            **{"prefix_bytes": 10, "prefix_budget_bytes": 100},
            **{"programs": (ProgramReport("decode_8x128", "loaded", 0.5),), "fallbacks": {}},
            **{"device_memory_bytes": None, "sleep": self.sleeper.metrics()},
        }

    def metrics(self):
        return self.recorder.snapshot(**self.state)

    def request(self, reason="stop", **changed):
        recorder, cost = self.recorder, stats(**changed)
        recorder.generations.submitted()
        recorder.generations.admitted(cost.queue_seconds)
        recorder.step(0, 0, cost.prefill_seconds)
        recorder.read_prompt(cost.prompt_tokens, cost.reused_tokens)
        recorder.first_token(cost.first_token_seconds)
        recorder.step(1, 8, cost.decode_seconds)
        recorder.tokens(cost.new_tokens - 1, cost.decode_seconds)
        recorder.finished(reason, 0.16, cost)

    def encoding(self, reason="done", seconds=0.02):
        """Record an encoding of two sentences in a bucket of four from its beginning to its end."""
        self.encodings.submitted()
        self.encodings.admitted(0.01)
        self.encodings.ran(2, Cost(2, 1, 10, 64), seconds - 0.01)
        self.encodings.finished(reason, seconds, seconds - 0.01)

    def submit(self, prompt=None, **options):
        self.options.append(options)
        return done(options.get("error", Result("abc", (1, 2, 3), "length", stats())))

    def stream(self, prompt=None, **options):
        return StandInStream()

    def submit_encode(self, sentences, **options):
        cost = SimpleNamespace(sentences=2, tokens=7)
        return done(SimpleNamespace(embeddings=[[1.0] * 3] * 2, stats=cost))

    def submit_client_call(self, client, limits, name, /, *args, **kwargs):
        return done(name if self.result is None else self.result)


class StandInStream:
    def __init__(self):
        self.pieces = iter([Piece(1, "a"), Piece(2, "b"), Piece(3, "c", "length", None, stats())])
        self.closed = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        for piece in self.pieces:
            return piece
        raise StopAsyncIteration

    async def aclose(self):
        self.closed = True


def served(name="demo", engine=None, **changed):
    verdict = Verdict("h100", (Axis("cuda", "at least", "13.0", "13.1", True),))
    bundle = SimpleNamespace(
        **{"name": "gpt2", "digest": DIGEST, "target": "h100", "matched": True},
        config=SimpleNamespace(decoder=None),
        verdicts=(verdict,),
        start_report=lambda: StartReport(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 99.0, 101.1, 1, 2, 3),
    )
    vars(bundle).update(changed)
    stand_in = engine if engine is not None else StandIn()
    return Served(name, bundle, stand_in, 0)
