"""One engine for all callers of a bundle: requests of any threads and tasks share one batch."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict, Unpack, final

from prejit.runtime.base import arguments
from prejit.runtime.base.once import once
from prejit.runtime.engine.loop import CacheState, GuardedMask, Loop, Ticket
from prejit.runtime.engine.memory import CachePlan, free_bytes, plan_caches
from prejit.runtime.engine.metrics import EngineMetrics, Recorder
from prejit.runtime.engine.stream import Answer, Pipe, Stream
from prejit.runtime.errors import ContextError
from prejit.runtime.fallback import fallback_counts
from prejit.runtime.generation.generate import Generation, Result
from prejit.runtime.generation.options import Options, Prompt, Resolved
from prejit.runtime.generation.rows import admit

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle

CPU_PREFILL_TOKENS, ACCELERATOR_PREFILL_TOKENS = 64, 512
"""How many positions of prompts a step computes beside decoding, on a CPU and on an accelerator."""


class Place(TypedDict, total=False):
    """How a request is served beside others.

    Attributes:
        priority: smaller is served first; 0 if it is not given.
        client: requests of different clients get fair shares of tokens.
        timeout: seconds until the request must be finished; None: any.
    """

    priority: int
    client: str
    timeout: float | None


class Served(Options, Place, total=False):
    """The options of a generation, and how it is served beside others."""


@final
class Engine:
    """Generates for all callers at once. Made by `Bundle.engine`. Safe to use from many threads and tasks.

    One thread steps one batch. Requests wait in a queue for a slot: by priority, then in fair shares of
    tokens between clients. Long prompts are computed in chunks between the steps of the others. Prompts that
    begin like an earlier one compute only the rest. The memory of all caches is bounded before the first
    request: what does not fit is refused when it is submitted.

    The tokens of a request are those of `Bundle.generate`, whatever runs beside it.

    Attributes:
        bundle: whose programs run.
    """

    def __init__(
        self,
        bundle: Bundle,
        resolve: Callable[[Options], Resolved],
        begin: Callable[[Prompt | None, Resolved], Generation],
        *,
        slots: int,
        queue: int,
        memory: int | None,
        prefix_memory: int | None,
        prefill_tokens: int | None,
    ) -> None:
        """Plan the memory, and start nothing. Use `Bundle.engine`, which describes the arguments."""
        self.bundle = bundle
        self._resolve = resolve
        self._begin = begin
        self._slots = arguments.integer("slots", slots, 1)
        self._queue = arguments.integer("queue", queue, 1)
        self._memory = None if memory is None else arguments.integer("memory", memory, 1)
        self._prefixes = (
            None if prefix_memory is None else arguments.integer("prefix_memory", prefix_memory, 0)
        )
        self._prefill_tokens = (
            None
            if prefill_tokens is None
            else arguments.integer("prefill_tokens", prefill_tokens, 1)
        )
        self._recorder = Recorder(self._slots, self._queue)
        if bundle.config.decoder is not None:
            self._loop  # noqa: B018 (an engine that cannot have its memory is an error now)

    @once
    def plan(self) -> CachePlan:
        """The largest cache of this engine, and the memory of all its caches.

        Raises:
            UsageError: the bundle has no decoder, or none of its contexts fits into the memory.
        """
        decoder = self.bundle.decoder
        budget = free_bytes(decoder.device) if self._memory is None else self._memory
        return plan_caches(decoder, self._slots, budget, self._prefixes)

    @once
    def _loop(self) -> Loop:
        decoder = self.bundle.decoder
        tokens = self._prefill_tokens
        if tokens is None:
            on_cpu = decoder.device.platform == "cpu"
            tokens = CPU_PREFILL_TOKENS if on_cpu else ACCELERATOR_PREFILL_TOKENS
        loop = Loop(decoder, self.plan, self._queue, tokens, self._recorder)
        weakref.finalize(self, loop.close)
        return loop

    def submit(self, prompt: Prompt | None = None, **options: Unpack[Served]) -> Answer:
        """Begin to generate from one prompt, and return the future of its result.

        `cancel` ends the request, whether it waits or runs. For tasks: `asyncio.wrap_future`.

        Args:
            prompt: as of `Bundle.generate`.
            **options: see `Options` and `Place`.

        Returns:
            A concurrent.futures.Future of a `Result`. Its exception may be DeadlineError, ClosedError, or one
            that `Bundle.generate` raises.

        Raises:
            UsageError: an option is out of range, or the bundle holds no decoder.
            ContextError: the prompt is longer than the longest context that has memory.
            QueueFullError: too many requests wait; it says how long to wait.
            ClosedError: the engine is draining or closed.
        """
        answer = Answer()
        ticket = self._ticket(prompt, options, answer)
        answer.on_cancel = _canceller(self._loop, ticket)
        self._loop.submit(ticket)
        return answer

    def generate(self, prompt: Prompt | None = None, **options: Unpack[Served]) -> Result:
        """Generate from one prompt and wait for the result. Arguments and errors as `submit`."""
        answer = self.submit(prompt, **options)
        try:
            return answer.result()
        except BaseException:  # ctrl-C too: nobody waits for it any more
            answer.cancel()
            raise

    def stream(self, prompt: Prompt | None = None, **options: Unpack[Served]) -> Stream:
        """Generate from one prompt and return its pieces as they come, for `for` and `async for`.

        Arguments and errors as `submit`. The call itself raises what `submit` raises; the iterator raises
        what happens later.
        """
        pipe = Pipe()
        ticket = self._ticket(prompt, options, pipe)
        pipe.on_cancel = _canceller(self._loop, ticket)
        self._loop.submit(ticket)
        return Stream(pipe)

    def _ticket(self, prompt: Prompt | None, options: Served, receiver: Answer | Pipe) -> Ticket:
        """Return a request that was checked, so that nothing is wrong with it when it gets a slot."""
        given = {**options}
        priority = arguments.integer("priority", given.pop("priority", 0), -(2**31), 2**31)
        client = arguments.instance("client", given.pop("client", ""), str)
        if (timeout := given.pop("timeout", None)) is not None:
            timeout = arguments.number("timeout", timeout, "more than 0", lambda value: value > 0)
        resolved = self._resolve(given)  # type: ignore[arg-type]  # what is left are Options
        guard, mask = None, resolved.common.get("token_mask")
        if mask is not None:
            guard = GuardedMask(mask, self.bundle.decoder.decoder.vocab_size)
            resolved = resolved._replace(common={**resolved.common, "token_mask": guard})
        generation = self._begin(prompt, resolved)
        length = len(generation.request.prompt)
        admit(generation.request, self.bundle.decoder)
        if length > self.plan.context:
            raise ContextError(
                f"prompt: expected at most {self.plan.context} tokens, for which the engine has memory, "
                f"found {length}",
                hint="shorten the prompt, or give the engine more memory or fewer slots",
            )
        now = time.perf_counter()
        deadline = None if timeout is None else now + timeout
        return Ticket(generation, receiver, client, priority, deadline, now, guard=guard)

    # ------------------------------------------------------------------ the engine as a whole

    def metrics(self) -> EngineMetrics:
        """Return what the engine has done since it was made, and its state now."""
        state, plan = CacheState(), None
        if self.bundle.config.decoder is not None:
            state, plan = self._loop.state, self.plan
        capacity = 0 if plan is None else plan.batch * plan.context
        return self._recorder.snapshot(
            kv_cache_usage=state.tokens / capacity if capacity else 0.0,
            cache_bytes=state.cache_bytes,
            cache_budget_bytes=None if plan is None else plan.budget_bytes,
            prefix_bytes=state.prefix_bytes,
            prefix_budget_bytes=0 if plan is None else plan.prefix_bytes,
            programs=self.bundle.report(),
            fallbacks=fallback_counts(),
            device_memory_bytes=self.bundle.device_memory_bytes(),
        )

    def drain(self, seconds: float | None = None) -> bool:
        """Take no more requests, and wait until those that wait and run are finished.

        Args:
            seconds: how long to wait; None: as long as it takes.

        Returns:
            Whether none is left.
        """
        if self.bundle.config.decoder is None:
            return True
        return self._loop.drain(seconds)

    def close(self) -> None:
        """End all requests with ClosedError, and free the caches. Closing twice is fine."""
        if self.bundle.config.decoder is not None:
            self._loop.close()


def _canceller(loop: Loop, ticket: Ticket) -> Callable[[], None]:
    """Return what ends a ticket, without a reference to the engine."""
    return lambda: loop.cancel(ticket)
