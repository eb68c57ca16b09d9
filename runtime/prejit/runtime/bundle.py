"""A loaded bundle: the object that a server holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, Unpack, final

from prejit.runtime.base.process_facts import Span, importing, is_plain_start, span
from prejit.runtime.base.threads_and_forks import OneProcess, disown_in_forks, once
from prejit.runtime.device.device import Device, free_dropped
from prejit.runtime.errors import ClosedError, UsageError
from prejit.runtime.format.blobs import Layer
from prejit.runtime.format.bundle_schema import Config, ProgramEntry, handler_names
from prejit.runtime.format.checks.program_table import check_weight_sets
from prejit.runtime.format.names import (
    EXECUTABLES_MEDIA_TYPE,
    GENERATION_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.verification import Verification
from prejit.runtime.programs.mapped_weights import open_weights
from prejit.runtime.programs.ready import ProgramReport, Programs
from prejit.runtime.store.runtime_cache import first_programs, remember_first_programs
from prejit.runtime.text.bundle_text import BundleText
from prejit.runtime.verdict import Axis, Verdict

if TYPE_CHECKING:
    import numpy as np

    from prejit.runtime.device.kernels import OpenLibrary
    from prejit.runtime.encoding.encoder import Encoded, EncoderPrograms
    from prejit.runtime.encoding.sentences import OnTooLong
    from prejit.runtime.format.trees import Path
    from prejit.runtime.generation.batch import Batch
    from prejit.runtime.generation.decoder_programs import DecoderPrograms
    from prejit.runtime.generation.defaults import Defaults
    from prejit.runtime.generation.generate import Piece, Result
    from prejit.runtime.generation.generator import Generator
    from prejit.runtime.generation.kv_cache import Prefix
    from prejit.runtime.generation.options import Options, Prompt, Request, Sampling
    from prejit.runtime.generation.session import Session
    from prejit.runtime.machine.fingerprint import Fingerprint
    from prejit.runtime.programs.bound import Bound
    from prejit.runtime.programs.canary import CheckedAnswer, Checks
    from prejit.runtime.programs.dispatched import DispatchedCalls
    from prejit.runtime.programs.known_calls import ChosenBucket
    from prejit.runtime.programs.on_jax import JaxPrograms
    from prejit.runtime.programs.user_programs import Calls, Pending
    from prejit.runtime.start.start_report import StartReport
    from prejit.runtime.text.tokenizer import Tokenizer


class LoadTimes(NamedTuple):
    """Times and sizes of `load`, from its call until it makes the Bundle.

    Attributes:
        started: when it was called, by time.perf_counter.
        is_first: whether it was the first call in this process.
        reads: when it read the index, manifests, configs and kernels.
        hashed_bytes: size of the files to be verified.
        receipt_bytes: size of the files with a receipt.
        verity_bytes: size of the files that the kernel verifies by fs-verity.
    """

    started: float
    is_first: bool
    reads: tuple[Span, ...]
    hashed_bytes: int
    receipt_bytes: int
    verity_bytes: int


class BundleUser(Protocol):
    """Whatever holds threads that use a bundle, such as an engine."""

    def close(self) -> None:
        """End its threads."""

    def disown(self, reason: ClosedError) -> object:
        """Refuse all calls in a forked process, and return what must not be freed there."""


class _Parts(NamedTuple):
    """The parts of an open bundle, which `close` drops.

    Attributes:
        layers: verified layers by media type.
        verification: of all files of the target.
        text: the tokenizer and the chat templates.
        device: where programs run.
        programs: the programs of the target.
    """

    layers: Mapping[str, Layer]
    verification: Verification
    text: BundleText
    device: Device
    programs: Programs


_CACHED = ("decoder", "generator", "encoder", "user_programs", "dispatched", "on_jax")
"""Properties that hold parts of an open bundle."""


@final
class Bundle(OneProcess):
    """A loaded bundle. Safe to use from many threads. A context manager closes it at its end.

    Attributes:
        name: the name of the bundle.
        digest: the digest of the bundle, its name in registries and logs.
        target: the target whose programs these are.
        matched: whether this machine matches that target; if not, programs are compiled here.
        verdicts: the comparison of this machine with each target.
        config: the program table.
        load_seconds: how long `load` took.
    """

    def __init__(
        self,
        digest: str,
        config: Config,
        layers: dict[str, Layer],
        verdicts: tuple[Verdict, ...],
        *,
        machine: Fingerprint,
        matched: bool,
        times: LoadTimes,
        serve_smaller: bool = False,
        kernels: OpenLibrary | None = None,
        no_libraries: str = "",
        types: Mapping[str, type[Any]] | None = None,
        compiles: bool = True,
        generation_config: bool = True,
        canary: Checks = "one",
        on_fallback: Callable[[Axis], object] | None = None,
    ) -> None:
        """Bind verified layers to a device. Use `prejit.runtime.load`."""
        self.name = config.bundle
        self.digest = digest
        self.target = config.target
        self.matched = matched
        self.verdicts = verdicts
        self.config = config
        self._types = types
        self._compiles = compiles
        self._generation_config = generation_config
        verification = layers[PORTABLE_MEDIA_TYPE].verification
        device = Device(machine.platform, config.mesh)
        if kernels is not None:  # before any executable is loaded that calls them
            from prejit.runtime.device.kernels import register

            register(kernels)
        weights = layers.get(WEIGHTS_MEDIA_TYPE)
        opened = None if weights is None else open_weights(weights)
        portable = layers[PORTABLE_MEDIA_TYPE]
        shapes = {} if opened is None else {n: value.shape for n, value in opened.values.items()}
        check_weight_sets(config, shapes, (weights or portable).path)
        asks = None
        if matched and any(program.golden is not None for program in config.programs):
            from prejit.runtime.programs.canary import Canary  # only golden answers need it

            asks = Canary(
                config.bundle,
                config.target,
                "" if weights is None else weights.digest,
                machine,
                checks=canary,
                compiles=compiles,
                on_fallback=on_fallback,
            )
        programs = Programs(
            config,
            device,
            layers[EXECUTABLES_MEDIA_TYPE] if matched else None,
            portable,
            opened,
            verification,
            serve_smaller=serve_smaller,
            calls={} if no_libraries else handler_names(*config.libraries or ()),
            no_calls=no_libraries,
            canary=asks,
        )
        text = BundleText(config.bundle, layers)
        self._users: weakref.WeakSet[BundleUser] = weakref.WeakSet()
        self._parts: _Parts | None = _Parts(layers, verification, text, device, programs)
        self._is_forked = False
        if config.decoder is not None:
            with importing():  # what the first token needs, while threads verify
                import prejit.runtime.generation.generator  # noqa: F401
        if config.decoder is not None and matched and not is_plain_start():
            programs.expect(
                first_programs(digest),
                lambda names: remember_first_programs(digest, names),
            )
        if config.encoder is not None and matched:
            self.encoder.start_loading(lambda: text.tokenizer)
        disown_in_forks(self, Bundle._disown)
        self._times = times
        self._loaded = span("loading", times.started)
        self.load_seconds = self._loaded.end - times.started

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Free the bundle: its memory on the device, its mapped files and its threads.

        It closes its engines first. Later calls raise ClosedError; closing again does nothing. Calls that
        still run end with a result or with ClosedError. A program that is being compiled is waited for.
        Sessions, batches, prefixes and bound programs hold their own arrays until they are dropped, and
        native libraries stay in the process.
        """
        for user in list(self._users):
            user.close()
        parts, self._parts = self._parts, None
        if parts is None:
            return
        reason = self._closed()
        cached = {name: vars(self).pop(name, None) for name in _CACHED}
        encoder: EncoderPrograms | None = cached["encoder"]
        dispatched: DispatchedCalls | None = cached["dispatched"]
        parts.verification.stop(reason)
        if encoder is not None:
            encoder.close()
        parts.programs.close(reason)
        if dispatched is not None:
            dispatched.close()
        del parts, cached, encoder, dispatched
        free_dropped()

    def _disown(self) -> object:
        """Refuse all calls, in a forked process. See `disown_in_forks`."""
        parts, self._parts = self._parts, None
        if parts is None:
            return None
        self._is_forked = True
        reason = self._closed()
        parts.verification.refuse(reason)
        return (
            parts,
            [vars(self).pop(name, None) for name in (*_CACHED, "_once")],
            parts.programs.refuse(reason),
            [user.disown(reason) for user in self._users],
        )

    def close_first(self, user: BundleUser) -> None:
        """Have `close` end this user before it frees the bundle, unless it is dropped earlier."""
        self._open  # noqa: B018 (a closed bundle has no use)
        self._users.add(user)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _open(self) -> _Parts:
        """The parts of an open bundle.

        Raises:
            ClosedError: the bundle is closed.
        """
        if (parts := self._parts) is None:
            raise self._closed()
        return parts

    def _closed(self) -> ClosedError:
        if self._is_forked:
            return ClosedError(
                f"{self.name}: expected a bundle that this process loaded, found one of the process that it "
                "was forked from, whose threads it does not have",
                hint="load it in the child, or start processes with multiprocessing's spawn or forkserver",
            )
        return ClosedError(
            f"{self.name}: expected an open bundle, found one that is closed",
            hint="load it again with `prejit.runtime.load`",
        )

    @property
    def _programs(self) -> Programs:
        return self._open.programs

    @property
    def _device(self) -> Device:
        return self._open.device

    @property
    def text(self) -> BundleText:
        """The tokenizer and the chat templates, where the bundle has them."""
        return self._open.text

    @property
    def _verification(self) -> Verification:
        return self._open.verification

    # ------------------------------------------------------------------ generation

    def generate(self, prompt: Prompt | None = None, **options: Unpack[Options]) -> Result:
        """Generate text from one prompt.

        Args:
            prompt: text, or token ids (`apply_chat_template` returns those of a conversation). An
                encoder-decoder reads `source`, and needs a prompt only for a text that has begun already.
            **options: see `Options`.

        Raises:
            UsageError: an option is out of range, or the bundle holds no decoder.
            ContextError: the prompt is longer than the longest context.
            RejectError: a program is damaged.
        """
        return self.generate_batch([prompt], **options)[0]

    def generate_n(self, prompt: Prompt | None, n: int, **options: Unpack[Options]) -> list[Result]:
        """Generate n continuations of one prompt. The prompt is computed once.

        The first result is the same as from `generate`; each further one uses the next seed. Arguments and
        errors as `generate`; n is 1 to 16,384.
        """
        return self.generator.generate_n(prompt, n, **options)

    def generate_batch(
        self,
        prompts: str | Sequence[Prompt | None] | None = None,
        *,
        sources: str | Sequence[Any] | None = None,
        sampling: Sequence[Sampling] | None = None,
        **options: Unpack[Options],
    ) -> list[Result]:
        """Generate from several prompts at the same time. Prompts without a free slot wait for one.

        Args:
            prompts: any number; a beginning that all of them share is computed once. One text is as good as a
                list of one. None: one for each source, which begins a text.
            sources: what an encoder-decoder reads, one for each prompt; each as the option `source`. One text
                is as good as a list of one.
            sampling: one for each prompt if they differ; they replace the bundle's defaults. None: the
                options decide.
            **options: for all prompts, as `generate`.

        Raises:
            UsageError, ContextError, RejectError: as `generate`.
        """
        return self.generator.generate_batch(prompts, sources=sources, sampling=sampling, **options)

    def stream(self, prompt: Prompt | None = None, **options: Unpack[Options]) -> Iterator[Piece]:
        """Generate from one prompt and yield each token as it comes.

        Closing the iterator, or ctrl-C, frees its memory. Arguments as `generate`.

        Raises:
            UsageError, ContextError, RejectError: as `generate`; those about the prompt at the first piece.
        """
        return self.generator.stream(prompt, **options)

    def session(self) -> Session:
        """Return a session, whose generations share a KV cache: a conversation computes only what is new.

        Raises:
            UsageError: the bundle holds no decoder.
        """
        from prejit.runtime.generation.session import Session  # only conversations need it

        return Session(self.generator)

    def prefix(self, prompt: Prompt) -> Prefix:
        """Compute the common beginning of many prompts once, such as a system prompt.

        Pass the result to other calls: `generate(..., prefix=...)`.

        Args:
            prompt: as of `generate`. Only whole tokens can be shared: a text should end at the end of one.

        Raises:
            UsageError, ContextError, RejectError: as `generate`.
        """
        return self.generator.prefix(prompt)

    def batch(self, slots: int) -> Batch:
        """Return slots for continuous batching: `insert` requests of `request`, `step`, `evict`.

        Args:
            slots: how many requests may run at a time; rounded up to one of the bundle's batch buckets.

        Raises:
            UsageError: the bundle holds no decoder, or no batch bucket is large enough.
        """
        from prejit.runtime.generation.batch import Batch

        return Batch(self.decoder, slots)

    def request(self, prompt: Prompt | None = None, **options: Unpack[Options]) -> Request:
        """Return a request for `Batch.insert`. Arguments as `generate`, without `stop`.

        Raises:
            UsageError: as `generate`; or `stop` is given, which a batch cannot do, because it has no text.
        """
        return self.generator.request(prompt, **options)

    @once
    def defaults(self) -> Defaults:
        """The options that the model's publisher recommends, for calls that do not give their own.

        All are unset if the bundle was loaded with `generation_config=False`.

        Raises:
            RejectError: the model's generation config is damaged.
        """
        from prejit.runtime.generation.defaults import Defaults, check_generation

        layer = self._open.layers.get(GENERATION_MEDIA_TYPE)
        if layer is None or self.config.decoder is None or not self._generation_config:
            return Defaults()
        return check_generation(bytes(layer.wait()), layer.path)

    @once
    def generator(self) -> Generator:
        """The decoder with its tokenizer and defaults, for callers that schedule generations themselves.

        Raises:
            UsageError: the bundle holds no decoder.
            RejectError: the model's generation config is damaged.
        """
        decoder = self.decoder
        from prejit.runtime.generation.generator import Generator

        return Generator(self.name, decoder, self.text, self.defaults)

    @once
    def decoder(self) -> DecoderPrograms:
        """The prefill and decode programs, for callers that run their own loop.

        Raises:
            UsageError: the bundle holds no decoder.
        """
        if self.config.decoder is None:
            raise UsageError(
                f"{self.name}: this bundle holds no decoder", hint=self._programs.usage
            )
        from prejit.runtime.generation.decoder_programs import DecoderPrograms

        return DecoderPrograms(self.config.decoder, self._programs, self._device)

    # ------------------------------------------------------------------ conversations

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts may be text."""
        return self.text.has_tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the bundle, for callers that need token ids or texts of their own.

        Raises:
            UsageError: the bundle has none.
            RejectError: it is damaged.
        """
        return self.text.need_tokenizer()

    @property
    def has_chat_template(self) -> bool:
        """Whether the bundle has a template for `apply_chat_template`."""
        return self.text.has_chat_template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the token ids of a conversation by the model's own template, a prompt for `generate`.

        Arguments and ids are those of transformers' method of the same name, with one exception: by default
        the header of the answer is added, because the ids are for generating.

        Args:
            messages: objects such as `{"role": "user", "content": "Hello"}`.
            template: name of one of several templates; None: `tool_use` if there are tools and the model has
                it, else `default`.
            add_generation_prompt: whether to add the header of the model's answer; None: yes, unless
                continue_final_message.
            continue_final_message: leave the last message open, so that the model continues it.
            tools: JSON schemas of the functions that the model may call.
            documents: documents that the model may cite, for templates that use them.
            **variables: other variables of the template, such as `enable_thinking`.

        Raises:
            UsageError: the bundle has no such template; the messages do not have the form that it takes, or
                it rejects them; or it needs more than a rendering may use (`sandbox.MAX_STEPS`).
            RejectError: the template is damaged.
        """
        text = self.render_chat_template(
            messages,
            template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            **variables,
        )
        room = None if self.config.decoder is None else self.decoder.contexts[-1]
        return self.tokenizer.encode(text, add_special_tokens=False, max_tokens=room)

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text that `apply_chat_template` encodes, with its special tokens spelled out.

        Arguments and errors as `apply_chat_template`.
        """
        return self.text.render(
            messages,
            template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            variables=variables,
        )

    # ------------------------------------------------------------------ embeddings

    def encode(
        self, sentences: str | Sequence[Prompt], *, on_too_long: OnTooLong = "truncate"
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return embeddings of sentences, float32 [N, D] in their order.

        Args:
            sentences: texts or lists of token ids; any number, of any lengths. One text is as good as a list
                of one.
            on_too_long: what to do with a sentence that has more tokens than the model or the longest shape
                of the manifest takes. `truncate`: cut it before its last special tokens, with one
                TruncationWarning per call. `error`: raise.

        Raises:
            UsageError: the bundle holds no encoder, or no tokenizer for a text; a token does not exist.
            ContextError: a sentence is too long, and on_too_long is `error`.
            RejectError: a program is damaged.
        """
        return self._encoded(sentences, on_too_long).embeddings

    def encode_batch(
        self, sentences: str | Sequence[Prompt], *, on_too_long: OnTooLong = "truncate"
    ) -> Encoded:
        """Return embeddings as `encode` does, with statistics: tokens, padding, buckets, times, programs."""
        return self._encoded(sentences, on_too_long)

    def _encoded(self, sentences: str | Sequence[Prompt], on_too_long: OnTooLong) -> Encoded:
        self._programs.ask()
        from prejit.runtime.encoding.sentences import embed, tokenize

        encoded = embed(self.encoder, tokenize(self.encoder, self.text, sentences, on_too_long))
        self.finish()
        return encoded

    def finish(self) -> None:
        """Wait until all bytes of the target are verified, before a caller gets a result.

        Raises:
            RejectError: the bundle is damaged.
        """
        self._verification.finish()
        self._programs.answer()

    @once
    def encoder(self) -> EncoderPrograms:
        """The programs of an encoder.

        Raises:
            UsageError: the bundle holds no encoder.
        """
        if self.config.encoder is None:
            raise UsageError(
                f"{self.name}: this bundle holds no encoder", hint=self._programs.usage
            )
        with importing():
            from prejit.runtime.encoding.encoder import EncoderPrograms  # decoders do not need it

        return EncoderPrograms(self.config.encoder, self._programs, self._device)

    # ------------------------------------------------------------------ programs of the user

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a program of the manifest's `[[program]]` sections.

        Args:
            name: the name of the program.
            *args: positional arguments, if the manifest has a list of them.
            **kwargs: keyword arguments, if the manifest has a table, and static arguments. Arguments are
                nested as the function takes them, of arrays that NumPy or DLPack reads and of numbers. Their
                shapes and the static arguments choose the bucket. Dtypes, weak types and constants, such as
                static fields of dataclasses, must be those of the build. Donated ones are copied first. NumPy
                arrays of 64 bits become 32, unless the build had jax_enable_x64 on.

        Returns:
            The results, nested as the function returned them: jax.Arrays if an argument was one, on the
            device where jax.jit would leave them, else NumPy arrays. Named tuples and dataclasses have their
            own class if it is one of `load`'s `types`, else one with the same fields. A random key is a key
            of jax, or its data as a NumPy array.

        Raises:
            UsageError: there is no such program, no bucket of it takes these arguments, jax's settings are
                not those of its trace, or arrays of jax are on several devices.
            RejectError: the program is damaged.
        """
        self._programs.ask()
        return self.dispatched.call(name, args, kwargs)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> Pending:
        """Run a program as `call` does, without waiting for it: `bundle.call_async(...).result()`.

        The arguments are copied.
        """
        self._programs.ask()
        return self.user_programs.call_async(name, args, kwargs)

    def call_on_device(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a program as `call` does, and leave its results on the device, for other programs.

            noise = bundle.call_on_device("encode", text)
            image = bundle.call("decode", noise)

        Arguments that are not on the device yet are copied.

        Returns:
            The results, nested as the function returned them, whose arrays are `OnDevice`: any method of this
            bundle that runs programs takes them, and NumPy reads them.

        Raises:
            UsageError, RejectError: as `call`; or the arguments would be padded.
        """
        self._programs.ask()
        return self.user_programs.call_on_device(name, args, kwargs)

    def call_by_path(
        self, name: str, given: Mapping[Path, Any], static: Mapping[str, Any] | None = None
    ) -> tuple[ChosenBucket, dict[Path, Any]]:
        """Run a program as `call` does, with each array by its path.

        Returns:
            The bucket that ran, and its results by path.
        """
        self._programs.ask()
        return self.user_programs.call_by_path(name, given, {} if static is None else static)

    def bind(self, name: str, /, *args: Any, **kwargs: Any) -> Bound:
        """Return a program that keeps some of its arguments on the device, as the state of a training step.

            step = bundle.bind("train_step", state=state)
            for batch in batches:
                loss = step(batch=batch)
            state = step.read()["state"]

        Args:
            name: the name of the program.
            *args: the first arguments, if the manifest has a list of them. They are copied.
            **kwargs: arguments by name. Each must come back among the results: under the same name, or else
                as the only result with the same structure, shapes and dtypes that has not the name of another
                argument. Static arguments hold for all calls.

        Raises:
            UsageError: there is no such program or argument, or no result can take an argument's place, or
                several can.
        """
        from prejit.runtime.programs.bound import Bound

        self._programs.ask()
        return Bound(self.user_programs, name, args, kwargs)

    def runner_with_zeros(self, program: ProgramEntry) -> Callable[[], object]:
        """Return a function that runs a program of kind `call` on zeros and waits for it; for measuring."""
        return self.user_programs.runner_with_zeros(program)

    @once
    def dispatched(self) -> DispatchedCalls:
        """The quickest way to each program of the user, for `call` and for engines."""
        from prejit.runtime.programs.dispatched import DispatchedCalls

        on_jax = None
        if self.matched and self.config.mesh is None:
            from prejit.runtime.programs.dispatched_on_jax import JaxDispatchedCalls

            on_jax = JaxDispatchedCalls(self.user_programs, lambda: self.on_jax)
        return DispatchedCalls(self.user_programs, on_jax)

    @once
    def user_programs(self) -> Calls:
        """The programs of the user, by name."""
        from prejit.runtime.programs.user_programs import Calls

        return Calls(self._programs, self._device, self._types, compiles=self._compiles)

    @once
    def on_jax(self) -> JaxPrograms:
        """The programs of the user on jax's own client, for `prejit.runtime.jit`."""
        from prejit.runtime.programs.on_jax import JaxPrograms

        return JaxPrograms(
            self._programs, self.config.programs, self._device.platform, self.config.mesh
        )

    # ------------------------------------------------------------------ all programs

    def prepare(self) -> None:
        """Make every program ready now. Otherwise each becomes ready when it is first used.

        Raises:
            RejectError: a program is damaged.
        """
        for name in self._programs.table:
            self._programs[name]

    def check_answers(self) -> Iterator[CheckedAnswer]:
        """Run every program that has a golden answer, one after the other, and yield what it found.

        What they answer is kept on this machine: an executable with a wrong answer is in quarantine, and one
        with a right answer in none. If this machine matches no target, the portable programs are compiled and
        run.

        Raises:
            RejectError: the bundle is damaged.
            BuildError: a portable program does not compile here.
        """
        return self._programs.check_answers()

    def wrong_answers(self) -> Iterator[str]:
        """Yield what loaded programs return in place of their golden answers: the smallest of each kind runs.

        They run on arrays of their own, beside whatever else runs. Unlike `check_answers`, this keeps
        nothing: the memory of this process or a file may be wrong, and not the executable.

        Raises:
            RejectError: the bundle is damaged.
        """
        return self._programs.wrong_answers()

    def report(self) -> tuple[ProgramReport, ...]:
        """Return how each program was obtained: loaded, compiled here, kept, compiling, or unused so far."""
        return self._programs.report()

    def start_report(self) -> StartReport:
        """Return where the time went from the start of this process to the first result, with hints.

        Call it soon after the first request, because hints look at what the process has done so far. Before
        the first result, a start ends with `load`.
        """
        from prejit.runtime.start.hints import hints
        from prejit.runtime.start.start_report import split

        verification, programs = self._verification, self._programs
        report = split(
            self._loaded,
            programs.asked,
            programs.answered,
            (*self._times.reads, *verification.waits, *programs.waits, *self.text.reads),
            is_first=self._times.is_first,
            read_share=verification.read_share,
            hashed_bytes=self._times.hashed_bytes,
            receipt_bytes=self._times.receipt_bytes,
            verity_bytes=self._times.verity_bytes,
        )
        blob = self._open.layers[PORTABLE_MEDIA_TYPE].path
        return replace(report, hints=hints(report, blob, programs.report()))

    def device_memory_bytes(self) -> int | None:
        """Return the peak memory in use on an accelerator; None on a CPU."""
        return self._device.memory_bytes()
