"""One engine for all callers of a bundle: requests of any threads and tasks share one batch."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack, final

from prejit.runtime.base import arguments
from prejit.runtime.base.threads_and_forks import OneProcess, making, once
from prejit.runtime.bundle import Bundle
from prejit.runtime.errors import ClosedError, ContextError, UsageError
from prejit.runtime.fallback_reporting import fallback_counts
from prejit.runtime.generation.finished_text import Result
from prejit.runtime.generation.options import Options, Prompt
from prejit.runtime.generation.rows import admit
from prejit.server.engine.engine_metrics import EngineMetrics
from prejit.server.engine.fair_queue import NO_LIMITS, Limits, Place
from prejit.server.engine.finalizers import when_dropped
from prejit.server.engine.generation_loop import Loop
from prejit.server.engine.memory import (
    CachePlan,
    NoRoomError,
    free_bytes,
    plan_caches,
    programs_bytes,
)
from prejit.server.engine.request_recorder import ENCODE, Observe, Recorder, kinds_of
from prejit.server.engine.sleeper import Room, Sleeper
from prejit.server.engine.stream import Answer, GuardedMask, Pipe, Stream, Ticket

if TYPE_CHECKING:
    from prejit.runtime.encoding.encoder import Encoded
    from prejit.runtime.encoding.sentences import OnTooLong
    from prejit.server.engine.microbatch_calls import Calling
    from prejit.server.engine.microbatch_encode import Encoding, Pair

_log = logging.getLogger(__name__)
logging.getLogger("prejit.server").addHandler(logging.NullHandler())
_LONGEST_TURN_SECONDS = 1.0  # how long the requests that an engine follows may go first


class RequestOptions(Options, Place, total=False):
    """The options of a generation, and how it is served beside others."""


@final
class Engine(OneProcess):
    """Generates for all callers at once. Safe to use from many threads and tasks.

    One thread steps one batch. Requests wait in a queue for a slot: by priority, then in fair shares of
    tokens between clients. Long prompts are computed in chunks between the steps of the others. Prompts that
    begin like an earlier one of the same client compute only the rest. The memory of all caches is bounded
    before the first request: what does not fit is refused when it is submitted.

    The tokens of a request are those of `Bundle.generate`, whatever runs beside it. Sentences and rows of
    several callers share runs of the encoder and of the user's programs.
    """

    def __init__(
        self,
        bundle: Bundle,
        slots: int | None = None,
        queue: int = 256,
        *,
        memory: int | None = None,
        prefix_memory: int | None = None,
        prefill_tokens: int | None = None,
        share_prefixes: bool = False,
        room: Room | None = None,
    ) -> None:
        """Plan the memory, and start nothing.

        Args:
            bundle: what it runs. Closing the bundle closes the engine first.
            slots: how many requests run at a time, rounded up to a batch bucket of the bundle; None: its
                largest. While fewer run, the engine uses the smallest bucket for them.
            queue: how many more may wait.
            memory: how many bytes all caches may take together, at any time; None: 80 % of the memory that is
                free on the device now. A prompt that would need more is refused when it is submitted.
            prefix_memory: how many bytes of that earlier prompts may take, for later prompts that begin like
                them; None: as much as the cache of the slots, and at most a quarter of what it leaves.
            prefill_tokens: how many positions of new prompts are computed between two decode steps; fewer
                make the gaps between tokens shorter and first tokens later. Beside few texts that run,
                it is more of them, for 0.2 s at most. None: 512 on an accelerator; on a CPU 64, or 32, or one
                for each slot, where 64 take longer than that.
            share_prefixes: let a prompt begin with what those of other clients have computed. A client that
                guesses a prompt can then see that it was sent.
            room: what shares memory with other engines. This one begins asleep then; its requests wake it.

        Raises:
            UsageError: a value is out of range, no batch bucket is large enough, or the memory is too small.
        """
        self._bundle = arguments.instance("bundle", bundle, Bundle)
        self._has_decoder = bundle.config.decoder is not None
        self._is_ending = self._is_closed = False
        self._reason: ClosedError | None = None
        if slots is None:
            slots = bundle.decoder.batches[-1] if self._has_decoder else 1
        self._slots = arguments.integer("slots", slots, 1)
        self._queue = arguments.integer("queue", queue, 1)
        self._memory = _optional("memory", memory, 1)
        self._prefixes = _optional("prefix_memory", prefix_memory, 0)
        self._prefill_tokens = _optional("prefill_tokens", prefill_tokens, 1)
        self._shares_prefixes = arguments.flag("share_prefixes", share_prefixes)
        self._recorder = Recorder(self._slots, self._queue, kinds_of(bundle.config))
        self._finalizers: list[weakref.finalize[..., object]] = []
        if self._has_decoder:
            device = bundle.decoder.device
            if device.in_cluster and device.mesh is not None:
                raise UsageError(
                    f"{bundle.name}: expected a mesh of one process, found one of a cluster: its processes "
                    "must all make the same calls, and each engine decides for itself",
                    hint="use `generate_batch` in all processes, or a mesh in one process",
                )
        need = programs_bytes(bundle) + (self.plan.peak_bytes if self._has_decoder else 0)
        self.sleeper = Sleeper(bundle.name, need, room, self._recorder.live)
        if self._has_decoder:
            self._loop  # noqa: B018 (an engine that cannot have its memory is an error now)
        bundle.close_first(self)

    @property
    def queue_size(self) -> int:
        """Maximum number of requests that wait for a slot."""
        return self._queue

    @once
    def plan(self) -> CachePlan:
        """The largest cache of this engine, and the memory of all its caches.

        Raises:
            UsageError: the bundle has no decoder, or none of its contexts fits into the memory.
        """
        decoder = self._bundle.decoder
        budget = free_bytes(decoder.device) if self._memory is None else self._memory
        return plan_caches(decoder, self._slots, budget, self._prefixes)

    @once
    def _loop(self) -> Loop:
        decoder = self._bundle.decoder
        name, plan = self._bundle.name, self.plan
        _log.info("%s: at most %d generations at once: %s", name, self._slots, plan)
        tokens, recorder = self._prefill_tokens, self._recorder
        loop = Loop(decoder, self.plan, self._queue, tokens, recorder, self.sleeper)
        self._finalizers.append(when_dropped(self, loop.close))
        return loop

    def submit(self, prompt: Prompt | None = None, **options: Unpack[RequestOptions]) -> Answer:
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
        self._submit(prompt, options, answer)
        return answer

    def generate(self, prompt: Prompt | None = None, **options: Unpack[RequestOptions]) -> Result:
        """Generate from one prompt and wait for the result. Arguments and errors as `submit`."""
        answer = self.submit(prompt, **options)
        try:
            return answer.result()
        except BaseException:  # ctrl-C too: nobody waits for it any more
            answer.cancel()
            raise

    def stream(self, prompt: Prompt | None = None, **options: Unpack[RequestOptions]) -> Stream:
        """Generate from one prompt and return its pieces as they come, for `for` and `async for`.

        Arguments and errors as `submit`. The call itself raises what `submit` raises; the iterator raises
        what happens later.
        """
        pipe = Pipe()
        self._submit(prompt, options, pipe)
        return Stream(pipe)

    def _submit(
        self, prompt: Prompt | None, options: RequestOptions, receiver: Answer | Pipe
    ) -> None:
        """Check a request, so that nothing is wrong with it when it gets a slot, and let it wait for one."""
        given = {**options}
        priority = arguments.integer("priority", given.pop("priority", 0), -(2**31), 2**31)
        client = arguments.instance("client", given.pop("client", ""), str)
        if (timeout := given.pop("timeout", None)) is not None:
            timeout = arguments.number("timeout", timeout, "more than 0", lambda value: value > 0)
        salt = arguments.instance("cache_salt", given.pop("cache_salt", ""), str)
        limits = arguments.instance("limits", given.pop("limits", NO_LIMITS), Limits)
        resolved = self._bundle.generator.resolve(given)  # type: ignore[arg-type]  # what is left are Options
        namespace = ("" if self._shares_prefixes else client, salt)
        resolved = resolved._replace(common={**resolved.common, "namespace": namespace})
        guard, mask = None, resolved.common.get("token_mask")
        if mask is not None:
            guard = GuardedMask(mask, self._bundle.decoder.decoder.vocab_size)
            resolved = resolved._replace(common={**resolved.common, "token_mask": guard})
        generation = self._bundle.generator.begin(prompt, resolved)
        length = len(generation.request.prompt)
        admit(generation.request, self._bundle.decoder)
        if length > self.plan.context:
            raise ContextError(
                f"prompt: expected at most {self.plan.context} tokens, for which the engine has memory, "
                f"found {length}",
                hint="shorten the prompt, or give the engine more memory or fewer slots",
            )
        now = time.perf_counter()
        deadline = None if timeout is None else now + timeout
        ticket = Ticket(generation, receiver, client, priority, limits, deadline, now, guard=guard)
        receiver.on_cancel = partial(self._loop.cancel, ticket)
        self._loop.submit(ticket)

    # ------------------------------------------------------------------ shared runs

    def encode(
        self,
        sentences: str | Sequence[Prompt | Pair],
        *,
        on_too_long: OnTooLong = "truncate",
        prompt_name: str | None = None,
        instruction: str | None = None,
        timeout: float | None = None,
    ) -> Encoded:
        """Return embeddings of sentences, which share runs of the encoder with those of other callers.

        Args:
            sentences: as of `Bundle.encode_batch`; of a model that scores, pairs of a query and a document.
            on_too_long: as of `Bundle.encode_batch`.
            prompt_name: as of `Bundle.encode_batch`.
            instruction: as of `Bundle.score`.
            timeout: seconds until they must be there; None: any.

        Raises:
            UsageError, ContextError, RejectError: as `Bundle.encode_batch`.
            DeadlineError: the timeout has passed.
            QueueFullError: too many calls wait; it says how long to wait.
            ClosedError: the engine is draining or closed.
        """
        encoding = self._encoding
        tokenized = encoding.tokenized(sentences, on_too_long, prompt_name, instruction)
        return encoding.encode(tokenized, timeout=timeout)

    def submit_encode(
        self,
        sentences: str | Sequence[Prompt | Pair],
        *,
        on_too_long: OnTooLong = "truncate",
        prompt_name: str | None = None,
        instruction: str | None = None,
        timeout: float | None = None,
        client: str = "",
        limits: Limits = NO_LIMITS,
    ) -> Future[Encoded]:
        """Begin to encode sentences as `encode` does, and return the future of the embeddings.

        Sentences of different clients get fair shares of runs; `limits` is how much this one may have.

        Raises:
            UsageError, ContextError, QueueFullError, ClosedError: as `encode`.
        """
        encoding = self._encoding
        tokenized = encoding.tokenized(sentences, on_too_long, prompt_name, instruction)
        return encoding.submit(tokenized, timeout=timeout, client=client, limits=limits)

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a program as `Bundle.call` does. Rows of several callers share runs of its largest bucket.

        A program declares that its rows may share a run by `batch` in the manifest's `pad`. Then a call may
        also have more rows than the largest bucket. Calls of other programs run one by one. Where sharing
        saves no time, calls run side by side in the threads of their callers.

        Raises:
            UsageError, RejectError: as `Bundle.call`.
            QueueFullError: too many calls of the program wait; it says how long to wait.
            ClosedError: the engine is draining or closed.
        """
        return self._calling.call(name, args, kwargs)

    def submit_call(self, name: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin to run a program as `call` does, and return the future of its result.

        The arguments are copied.
        """
        return self._calling.submit(name, args, kwargs)

    def submit_client_call(
        self, client: str, limits: Limits, name: str, /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Begin to run a program for a client, as `submit_call` does. Clients get fair shares of rows.

        `limits` is how many calls of the program the client may have.

        Raises:
            UsageError, QueueFullError, ClosedError: as `call`.
        """
        return self._calling.submit(name, args, kwargs, client=client, limits=limits)

    @once
    def _encoding(self) -> Encoding:
        self._check_open()
        from prejit.server.engine.microbatch_encode import Encoding  # decoders do not need it

        encoding = Encoding(
            self._bundle.encoder,
            self._bundle.text,
            self._bundle.finish,
            queue=self._queue,
            recorder=self._recorder.requests(*ENCODE),
            sleeper=self.sleeper,
        )
        self._finalizers.append(when_dropped(self, encoding.close))
        return encoding

    @once
    def _calling(self) -> Calling:
        self._check_open()
        from prejit.server.engine.microbatch_calls import Calling  # decoders do not need it

        calling = Calling(
            self._bundle.user_programs,
            self._bundle.dispatched,
            queue=self._queue,
            recorder=partial(self._recorder.requests, "call"),
            sleeper=self.sleeper,
        )
        self._finalizers.append(when_dropped(self, calling.close))
        return calling

    def _check_open(self) -> None:
        if self._reason is not None:
            raise ClosedError(str(self._reason), hint=self._reason.hint)
        if self._is_ending:
            raise ClosedError(
                f"{self._bundle.name}: expected an open engine, found one that takes no more calls",
                hint="make a new one with `prejit.server.Engine(bundle)`",
            )

    def _shared(self) -> list[Encoding | Calling]:
        """Return what shares runs, if it was used. If it is being made, its first call must not be missed."""
        with making(self):
            return [vars(self)[name] for name in ("_encoding", "_calling") if name in vars(self)]

    # ------------------------------------------------------------------ the engine as a whole

    def metrics(self) -> EngineMetrics:
        """Return what the engine has done since it was made, and its state now."""
        state = plan = None
        if self._has_decoder:
            state, plan = self._loop.state, self.plan
        capacity = 0 if plan is None else plan.batch * plan.context
        return self._recorder.snapshot(
            programs=self._bundle.report(),
            kv_cache_usage=state.tokens / capacity if state and capacity else 0.0,
            cache_bytes=None if state is None else state.cache_bytes,
            cache_budget_bytes=None if plan is None else plan.budget_bytes,
            prefix_bytes=None if state is None else state.prefix_bytes,
            prefix_budget_bytes=None if plan is None else plan.prefix_bytes,
            fallbacks=MappingProxyType(dict(fallback_counts())),
            device_memory_bytes=self._bundle.device_memory_bytes(),
            sleep=self.sleeper.metrics(),
        )

    def observe(self, observe: Observe | None) -> None:
        """Show each step of the batch and each request that ends from now on; None: to nobody any more."""
        self._recorder.observe(observe)

    @property
    def growth_bytes(self) -> int:
        """How much more its caches may take than they do now."""
        if not self._has_decoder:
            return 0
        state = self._loop.state
        return max(0, self.plan.peak_bytes - state.cache_bytes - state.prefix_bytes)

    def sleep(self, *, between: bool = False) -> bool:
        """Give back the memory of caches, buffers and executables; return whether the engine sleeps.

        Weights stay mapped files. It does nothing while requests run or wait. The next request wakes it.

        Args:
            between: requests may wait. If some run, no others begin until those have ended, for a moment.
        """
        return self.sleeper.sleep(self._free, between=between)

    def _free(self) -> None:
        if (loop := vars(self).get("_loop")) is not None:
            loop.free()
        self._bundle.sleep()

    def wake(self) -> None:
        """Take memory again, and make the programs ready that were used before. Requests do it, too.

        Raises:
            NoRoomError: other engines leave too little memory.
            ClosedError: the engine is closed.
        """
        self._check_open()
        if not self.sleeper.try_begin():
            self.sleeper.give_up()
            raise NoRoomError(
                f"{self._bundle.name}: expected {self.sleeper.need_bytes:,} bytes for caches and programs, "
                "found less beside what runs now",
                hint="try it again later, or give more memory",
            )
        try:
            self._bundle.wake()
        finally:
            self.sleeper.end()

    def begin_after(self, earlier: Engine) -> None:
        """Begin no generation while requests wait in an engine that this one follows, for a second at most.

        Two engines that run at once take turns with Python's lock at each step: a token that took 2 ms took
        17. So those that were sent before come first.
        """
        if self._has_decoder and earlier._has_decoder:
            self._loop.begin_after(earlier._loop, _LONGEST_TURN_SECONDS)

    def drain(self, seconds: float | None = None) -> bool:
        """Take no more requests, and wait until those that wait and run are finished.

        Args:
            seconds: how long to wait; None: as long as it takes.

        Returns:
            Whether none is left.
        """
        self._is_ending = True
        deadline = None if seconds is None else time.monotonic() + seconds
        for shared in self._shared():
            shared.drain(0.0)  # all refuse new calls before one is waited for
        is_drained = not self._has_decoder or self._loop.drain(seconds)
        return all([is_drained, *(shared.drain(deadline) for shared in self._shared())])

    def undrain(self) -> None:
        """Take requests again after `drain`, which ends its wait.

        Raises:
            ClosedError: the engine is closed.
        """
        self._is_ending = self._is_closed
        self._check_open()
        for shared in self._shared():
            shared.undrain()
        if self._has_decoder:
            self._loop.undrain()

    def close(self) -> None:
        """End all requests with ClosedError, and free the caches. Closing twice is fine."""
        self._is_ending = self._is_closed = True
        self.sleeper.close()
        for shared in self._shared():
            shared.close()
        if (loop := vars(self).get("_loop")) is not None:
            loop.close()
        self.sleeper.sleep(lambda: None, between=True)
        if loop is not None:
            loop.drop()
        for finalizer in self._finalizers:
            finalizer.detach()

    def disown(self, reason: ClosedError) -> object:
        """Refuse all calls, in a forked process. See `disown_in_forks`."""
        self._is_ending = self._is_closed = True
        self._reason = reason
        return [vars(self).pop(name, None) for name in ("_loop", "_encoding", "_calling", "_once")]


def _optional(name: str, value: int | None, least: int) -> int | None:
    return None if value is None else arguments.integer(name, value, least)
