"""A loaded bundle: what a server holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, final

from prejit.runtime.base import arguments
from prejit.runtime.base.once import once
from prejit.runtime.base.process import is_plain_start
from prejit.runtime.device.dtypes import dtype_of
from prejit.runtime.device.executable import (
    Device,
    aligned_zeros,
    is_jax_array,
    register_library,
    to_jax,
    to_numpy,
)
from prejit.runtime.errors import UsageError
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.blobs import Layer
from prejit.runtime.format.config_checks import check_weight_sets
from prejit.runtime.format.layer_checks import check_chat
from prejit.runtime.format.names import (
    CHAT_MEDIA_TYPE,
    EXECUTABLES_MEDIA_TYPE,
    GENERATION_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    TOKENIZER_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.schema import Config, Program
from prejit.runtime.generation.batch import Batch
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.defaults import Defaults, check_generation
from prejit.runtime.generation.generate import Generation, Piece, Result, run
from prejit.runtime.generation.kv_cache import Prefix
from prejit.runtime.generation.prefill import compute_prefix
from prejit.runtime.generation.request import SAMPLING_OPTIONS, Request, Wanted, admit, resolve
from prejit.runtime.generation.sampling import Sampling
from prejit.runtime.options import Options, Prompt
from prejit.runtime.programs import pytree
from prejit.runtime.programs.programs import ProgramReport, Programs
from prejit.runtime.programs.weights import tensors
from prejit.runtime.session import Session
from prejit.runtime.store.first_programs import first_programs, remember_first_programs
from prejit.runtime.verdict import Verdict

if TYPE_CHECKING:
    import numpy as np

    from prejit.runtime.device.kernels import Library
    from prejit.runtime.encoding.encoder import Encoded, EncoderPrograms
    from prejit.runtime.encoding.sentences import OnTooLong
    from prejit.runtime.text.chat import ChatTemplates
    from prejit.runtime.text.tokenizer import Tokenizer


@final
class Bundle:
    """A loaded bundle. Safe for many threads.

    Attributes:
        name: of the bundle.
        digest: of the bundle: its name in registries and logs.
        target: the target whose programs these are.
        matched: whether this machine is that target; otherwise programs are compiled here.
        verdicts: the comparison of this machine with each target.
        config: the program table.
        load_seconds: that `load` took.
    """

    def __init__(
        self,
        digest: str,
        config: Config,
        layers: dict[str, Layer],
        verdicts: tuple[Verdict, ...],
        *,
        platform: str,
        matched: bool,
        started: float,
        serve_smaller: bool = False,
        kernels: Library | None = None,
    ) -> None:
        """Binds verified layers to a device. Use `prejit.runtime.load`."""
        self.name = config.bundle
        self.digest = digest
        self.target = config.target
        self.matched = matched
        self.verdicts = verdicts
        self.config = config
        self._layers = layers
        self._device = Device(platform, config.mesh)
        if kernels is not None:  # before any executable is loaded that calls them
            register_library(kernels)
        weights = layers.get(WEIGHTS_MEDIA_TYPE)
        values = tensors(weights) if weights is not None else {}
        portable = layers[PORTABLE_MEDIA_TYPE]
        shapes = {name: value.shape for name, value in values.items()}
        check_weight_sets(config, shapes, (weights or portable).path)
        self._programs = Programs(
            config,
            self._device,
            layers[EXECUTABLES_MEDIA_TYPE] if matched else None,
            portable,
            values,
            serve_smaller=serve_smaller,
        )
        if config.decoder is not None and matched and not is_plain_start():
            self._programs.expect(
                first_programs(digest),
                lambda names: remember_first_programs(digest, names),
            )
        if config.encoder is not None and matched:
            self.encoder.start_loading(lambda: self._tokenizer)
        self.load_seconds = time.perf_counter() - started

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """Generates text from one prompt.

        Args:
            prompt: text, or token ids as they are (`apply_chat_template` gives those of a conversation).
            **options: see `Options`.

        Raises:
            UsageError: an option is out of its range, or the bundle holds no decoder.
            ContextError: the prompt is longer than the longest context.
            RejectError: a program is damaged.
        """
        return self.generate_batch([prompt], **options)[0]

    def generate_n(self, prompt: Prompt, n: int, **options: Unpack[Options]) -> list[Result]:
        """Generates n continuations of one prompt, which is computed once.

        The first is what `generate` gives; each further one has the next seed. Arguments and errors as
        `generate`; n is 1 to 16,384.
        """
        n = arguments.integer("n", n, 1, arguments.MAX_SEQUENCES)
        first = self._resolve(options)
        seeds = [(first.sampling.seed + index) % 2**64 for index in range(n)]
        each = [replace(first, sampling=replace(first.sampling, seed=seed)) for seed in seeds]
        return self._generate([self._encode(prompt)] * n, each)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: Sequence[Sampling] | None = None,
        **options: Unpack[Options],
    ) -> list[Result]:
        """Generates from several prompts side by side; those that find no slot wait for one.

        Args:
            prompts: any number; a beginning that all share is computed once.
            sampling: of each prompt, where they differ, complete: without the bundle's defaults; None: as
                the options say.
            **options: of all of them, as `generate`.

        Raises:
            UsageError, ContextError, RejectError: as `generate`.
        """
        listed = arguments.items("prompts", prompts, "a list of prompts")
        wanted = self._resolve(options)
        if sampling is None:
            return self._generate(listed, [wanted] * len(listed))
        each = arguments.items("sampling", sampling, "a list of Sampling, one a prompt")
        if len(each) != len(listed):
            raise UsageError(f"sampling: expected {len(listed)}, one a prompt; found {len(each)}")
        if beside := [name for name in SAMPLING_OPTIONS if options.get(name) is not None]:
            raise UsageError(
                f"sampling: expected it without other options of sampling, found {beside[0]}",
                hint=f"give each prompt's {beside[0]} in its Sampling",
            )
        return self._generate(listed, [replace(wanted, sampling=one) for one in each])

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Piece]:
        """Generates from one prompt and gives each token as it comes.

        Closing the iterator, or ctrl-C, frees what it holds. Arguments as `generate`.

        Raises:
            UsageError, ContextError, RejectError: as `generate`, at the first piece.
        """
        return self._stream(prompt, self._resolve(options))

    def session(self) -> Session:
        """A session: its generations share a KV cache, so that a conversation computes only what is new.

        Raises:
            UsageError: the bundle holds no decoder.
        """
        return Session(self)

    def prefix(self, prompt: Prompt) -> Prefix:
        """Computes what many prompts begin with, such as a system prompt, once: `generate(..., prefix=...)`.

        Args:
            prompt: as of `generate`. Only whole tokens are shared: a text should end where a token does.

        Raises:
            UsageError, ContextError, RejectError: as `generate`.
        """
        row = admit(Request(self._encode(prompt)), self.decoder)
        context = self.decoder.context_for(len(row.token_ids))
        return compute_prefix(self.decoder, row.token_ids, context, row.usage)

    def batch(self, slots: int) -> Batch:
        """Slots for continuous batching: `insert` requests of `request`, `step`, `evict`.

        Args:
            slots: how many requests may run at a time; rounded up to one of the bundle's batches.

        Raises:
            UsageError: the bundle holds no decoder, or no batch so large.
        """
        return Batch(self.decoder, slots)

    def request(self, prompt: Prompt, **options: Unpack[Options]) -> Request:
        """A request for `Batch.insert`. Arguments as `generate`; `stop` is the caller's, as text is."""
        wanted = self._resolve(options)
        if wanted.stop:
            raise UsageError(
                "stop: expected none, since a batch knows tokens and no text",
                hint="push text through prejit.runtime.text.stop.StopStrings and evict the slot",
            )
        return wanted.request(self._encode(prompt))

    def _resolve(self, options: Options) -> Wanted:
        return resolve({**options}, self.defaults.options())

    def _generate(self, prompts: Sequence[Prompt], each: Sequence[Wanted]) -> list[Result]:
        generations = [
            self._generation(prompt, wanted) for prompt, wanted in zip(prompts, each, strict=True)
        ]
        for _ in run(self.decoder, generations):
            pass
        return [generation.result() for generation in generations]

    def _stream(self, prompt: Prompt, wanted: Wanted) -> Iterator[Piece]:
        for _, piece in run(self.decoder, [self._generation(prompt, wanted)]):
            yield piece

    def _generation(self, prompt: Prompt, wanted: Wanted) -> Generation:
        if wanted.stop and self._tokenizer is None:
            raise UsageError(
                f"{self.name}: this bundle has no tokenizer, so nothing can stop at a string",
                hint="give stop_token_ids, or build from a model directory with a tokenizer.json",
            )
        request = wanted.request(self._encode(prompt))
        return Generation(self.decoder, request, self._tokenizer, wanted.stop)

    def encode(
        self, sentences: Sequence[Prompt], *, on_too_long: OnTooLong = "truncate"
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Embeddings of sentences, float32 [N, D] in their order.

        Args:
            sentences: texts, or token ids as they are; any number, of any lengths.
            on_too_long: of a sentence with more tokens than the model or the longest shape of the manifest
                takes: `truncate` cuts it off before its last special tokens, with one TruncationWarning
                a call; `error` raises.

        Raises:
            UsageError: the bundle holds no encoder, or no tokenizer for a text; a token does not exist.
            ContextError: a sentence is too long, and on_too_long is `error`.
            RejectError: a program is damaged.
        """
        return self._encode_sentences(sentences, on_too_long).embeddings

    def encode_batch(
        self, sentences: Sequence[Prompt], *, on_too_long: OnTooLong = "truncate"
    ) -> Encoded:
        """As `encode`, with the accounting: tokens, padding, buckets, times, programs."""
        return self._encode_sentences(sentences, on_too_long)

    def _encode_sentences(self, sentences: Sequence[Prompt], on_too_long: OnTooLong) -> Encoded:
        encoder = self.encoder
        from prejit.runtime.encoding.encoder import Encoded
        from prejit.runtime.encoding.sentences import check_ids, shortened

        listed = arguments.items("sentences", sentences, "a list of texts")
        arguments.choice("on_too_long", on_too_long, ("truncate", "error"))
        started = time.perf_counter()
        texts = [sentence for sentence in listed if isinstance(sentence, str)]
        encoded = iter(self._need_tokenizer().encode_batch(texts) if texts else ())
        ids = [
            next(encoded)
            if isinstance(sentence, str)
            else arguments.integers(f"sentences[{place}]", sentence, "text or a list of token ids")
            for place, sentence in enumerate(listed)
        ]
        tokenized = time.perf_counter()
        check_ids(ids, encoder.encoder.vocab_size)
        limit = encoder.max_tokens
        of_model = limit == encoder.encoder.max_tokens
        why = "which the model takes" if of_model else "the longest shape of the manifest"
        truncated = shortened(ids, limit, lambda: self._tokenizer, on_too_long, why)
        embeddings, stats = encoder.encode(ids)
        seconds = tokenized - started
        return Encoded(embeddings, replace(stats, truncated=truncated, tokenize_seconds=seconds))

    @once
    def encoder(self) -> EncoderPrograms:
        """The programs of an encoder.

        Raises:
            UsageError: the bundle holds no encoder.
        """
        if self.config.encoder is None:
            raise UsageError(
                f"{self.name}: this bundle holds no encoder",
                hint="build it from a manifest with [encode]",
            )
        from prejit.runtime.encoding.encoder import EncoderPrograms  # no decoder needs it

        return EncoderPrograms(self.config.encoder, self._programs, self._device)

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a program of the manifest's `[[program]]` sections.

        Args:
            name: of the program.
            *args: positional arguments, where the manifest gives a list.
            **kwargs: keyword arguments, where it gives a table. Both are nested dicts, lists and tuples
                of arrays, each anything that NumPy or DLPack reads. The bucket is the one that has
                their shapes.

        Returns:
            The results, nested as the function returned them (sequences as tuples, named tuples and
            dataclasses as dicts); NumPy arrays, or
            jax.Arrays where an argument was one.

        Raises:
            UsageError: there is no such program, or no bucket of it takes these arguments.
            RejectError: the program is damaged.
        """
        arguments.text("name", name)
        try:
            given = {**dict(pytree.leaves(args)), **dict(pytree.leaves(kwargs))}
        except RecursionError:
            raise UsageError(
                f"{name:.80}: expected arguments nested less deeply than Python's recursion limit"
            ) from None
        return self.call_leaves(name, given)

    def call_leaves(self, name: str, given: Mapping[pytree.Path, Any]) -> Any:
        """As `call`, with the arguments flat: each array by its path. Raises as `call`."""
        arguments.text("name", name)
        if not isinstance(given, Mapping) or not all(isinstance(path, tuple) for path in given):
            arguments.refuse("given", "a mapping of paths to arrays", given)
        values = {path: _as_numpy(path, value) for path, value in given.items()}
        program = self._bucket_for(name, values)
        wanted = self._programs.arguments(program.name)
        paths = [result.path for result in self._programs.results(program.name)]
        inputs = [self._device.put(values[a.path], a.sharding) for a in wanted]
        results = self._programs[program.name].run(
            [*self._programs.weights(program.weights), *inputs]
        )
        convert = to_jax if any(map(is_jax_array, given.values())) else to_numpy
        return pytree.unflatten(paths, [convert(result) for result in results])

    def runner_with_zeros(self, program: Program) -> Callable[[], object]:
        """A function that runs a program of kind `call` on zeros and waits for it; for measuring."""
        wanted = self._programs.arguments(program.name)
        inputs = [
            self._device.put(aligned_zeros(a.shape, dtype_of(a.dtype)), a.sharding) for a in wanted
        ]
        executable = self._programs[program.name]
        weights = self._programs.weights(program.weights)
        return lambda: to_numpy(executable.run([*weights, *inputs])[0])

    @once
    def defaults(self) -> Defaults:
        """How the model's publisher wants it to generate: for requests that do not say it themselves.

        Raises:
            RejectError: the model's generation config is damaged.
        """
        layer = self._layers.get(GENERATION_MEDIA_TYPE)
        if layer is None or self.config.decoder is None:
            return Defaults()
        return check_generation(bytes(layer.content), self.config.format, layer.path)

    def report(self) -> tuple[ProgramReport, ...]:
        """How each program was obtained: loaded, compiled here, kept here, compiling, or unused so far."""
        return self._programs.report()

    def device_memory_bytes(self) -> int | None:
        """The most memory of an accelerator that was ever in use; None on a CPU."""
        return self._device.memory_bytes()

    def prepare(self) -> None:
        """Makes every program ready now, rather than when it is first wanted.

        Raises:
            RejectError: a program is damaged.
        """
        for name in self._programs.table:
            self._programs[name]

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts may be text."""
        return TOKENIZER_MEDIA_TYPE in self._layers

    @once
    def decoder(self) -> DecoderPrograms:
        """The prefill and decode programs, for callers that run sessions of their own.

        Raises:
            UsageError: the bundle holds no decoder.
        """
        if self.config.decoder is None:
            raise UsageError(
                f"{self.name}: this bundle holds no decoder",
                hint=f"its programs are {', '.join(self._programs.table)}; run one with `call`",
            )
        return DecoderPrograms(self.config.decoder, self._programs, self._device)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` has a template to apply."""
        return CHAT_MEDIA_TYPE in self._layers

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
        """Token ids of a conversation, by the model's own template: a prompt for `generate` and `stream`.

        The ids of transformers' method of the same name, whose arguments these are; but the header of the
        answer is added where nothing else is said, since the ids are for generating.

        Args:
            messages: each an object such as `{"role": "user", "content": "Hello"}`.
            template: its name, of a model with several; None: `tool_use` where there are tools and the
                model has it, else `default`.
            add_generation_prompt: whether the header of the model's answer follows; None: unless
                continue_final_message.
            continue_final_message: leave the last message open, for the model to go on with it.
            tools: JSON schemas of the functions that the model may call.
            documents: that the model may cite, where its template knows them.
            **variables: others that the template reads, such as `enable_thinking`.

        Raises:
            UsageError: the bundle has no such template; the messages have not the form that it takes,
                or it refuses them; it would use more than is allowed (`chat.MAX_STEPS`).
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
        return self._tokenize(text, add_special_tokens=False)

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
        """The text that `apply_chat_template` encodes. It spells its special tokens, a BOS among them.

        Arguments and errors as `apply_chat_template`.
        """
        if self._chat is None:
            raise UsageError(
                f"{self.name}: this bundle has no chat template",
                hint="give the prompt as text, or build from a model directory whose "
                "tokenizer_config.json has a chat_template",
            )
        if template is not None:
            arguments.text("template", template)
        continues = arguments.flag("continue_final_message", continue_final_message)
        begins = not continues
        if add_generation_prompt is not None:
            begins = arguments.flag("add_generation_prompt", add_generation_prompt)
        try:
            return self._chat.render(
                messages,
                template=template,
                add_generation_prompt=begins,
                continue_final_message=continues,
                tools=tools,
                documents=documents,
                variables=variables,
            )
        except RecursionError:
            raise UsageError(
                "messages: expected objects nested less deeply than Python's recursion limit"
            ) from None

    @once
    def _chat(self) -> ChatTemplates | None:
        layer = self._layers.get(CHAT_MEDIA_TYPE)
        if layer is None:
            return None
        from prejit.runtime.text.chat import (
            ChatTemplates,
        )  # Jinja costs 40 ms, and only chats need it

        return ChatTemplates(check_chat(bytes(layer.content), layer.path), layer.path)

    @once
    def _tokenizer(self) -> Tokenizer | None:
        layer = self._layers.get(TOKENIZER_MEDIA_TYPE)
        if layer is None:
            return None
        from prejit.runtime.text.tokenizer import Tokenizer  # costs 20 ms, and only text needs it

        return Tokenizer(layer.content[:], layer.path)

    def _encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt; all that were given as ids are of the vocabulary."""
        checked = arguments.prompt("prompt", prompt, self.decoder.decoder.vocab_size)
        return self._tokenize(checked) if isinstance(checked, str) else checked

    def _tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self._need_tokenizer()
        room = None if self.config.decoder is None else self.decoder.contexts[-1]
        return tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=room)

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise UsageError(
                f"{self.name}: this bundle has no tokenizer, so a prompt cannot be text",
                hint="give token ids, or build from a model directory with a tokenizer.json",
            )
        return self._tokenizer

    def _bucket_for(self, name: str, values: dict[pytree.Path, Any]) -> Program:
        buckets = [p for p in self._programs.table.values() if p.name.partition("/")[0] == name]
        buckets = [program for program in buckets if program.kind == "call"]
        if not buckets:
            names = {
                p.name.partition("/")[0] for p in self._programs.table.values() if p.kind == "call"
            }
            raise UsageError(
                f"{self.name}: no program {name!r}",
                hint=f"its programs are: {', '.join(sorted(names)) or 'none'}",
            )
        complaints = []
        for program in buckets:
            complaint = _complaint(self._programs.arguments(program.name), values)
            if complaint is None:
                return program
            complaints.append(f"{program.name}: {complaint}")
        raise UsageError(
            f"no bucket of {name!r} takes these arguments: {'; '.join(complaints)}",
            hint="pass arrays of these shapes and dtypes, or add a bucket to the manifest",
        )


def _complaint(wanted: Sequence[Array], values: dict[pytree.Path, Any]) -> str | None:
    """Why a program does not take these arguments, or None."""
    for array in wanted:
        value = values.get(array.path)
        spelled = pytree.spell(array.path)
        if value is None:
            return f"{spelled} is missing"
        if value.shape != array.shape or value.dtype != dtype_of(array.dtype):
            shapes = f"{array.dtype}{list(array.shape)}, found {value.dtype}{list(value.shape)}"
            return f"{spelled}: expected {shapes}"
    if unknown := values.keys() - {array.path for array in wanted}:
        return f"unexpected {pytree.spell(min(unknown, key=str))}"
    return None


def _as_numpy(path: pytree.Path, value: Any) -> Any:
    import numpy as np

    try:
        if is_jax_array(value) or hasattr(value, "__array__") or not hasattr(value, "__dlpack__"):
            return np.asarray(value)
        return np.from_dlpack(value)
    except (
        Exception
    ) as error:  # a deleted buffer, another device: whatever the value's library raises
        raise UsageError(
            f"{pytree.spell(path)}: expected an array that NumPy or DLPack reads, found "
            f"{type(value).__name__}: {error}"
        ) from error
