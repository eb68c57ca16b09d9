"""A loaded bundle: what a server holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

from prejit.runtime import bundle, pytree, verify
from prejit.runtime.bundle import Array, Config, Program
from prejit.runtime.errors import UsageError
from prejit.runtime.executable import Device, aligned_zeros, is_jax_array, to_jax, to_numpy
from prejit.runtime.fingerprint import Verdict
from prejit.runtime.generate import (
    DecoderPrograms,
    Piece,
    Result,
    Sampling,
    Timer,
    run_rows,
    stream_text,
)
from prejit.runtime.programs import Layer, ProgramReport, Programs
from prejit.runtime.weights import dtype_of, tensors

if TYPE_CHECKING:
    from prejit.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]


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
        weights = layers.get(bundle.WEIGHTS_MEDIA_TYPE)
        values = tensors(weights) if weights is not None else {}
        portable = layers[bundle.PORTABLE_MEDIA_TYPE]
        shapes = {name: value.shape for name, value in values.items()}
        verify.check_weight_sets(config, shapes, (weights or portable).path)
        self._programs = Programs(
            config,
            self._device,
            layers[bundle.EXECUTABLES_MEDIA_TYPE] if matched else None,
            portable,
            values,
            serve_smaller=serve_smaller,
        )
        self.load_seconds = time.perf_counter() - started

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Result:
        """Generates text from one prompt.

        Args:
            prompt: text, or token ids as they are.
            max_new_tokens: stop after so many; None: when a stop token comes or the context is full.
            temperature: 0 takes the most likely token; otherwise logits are divided by it.
            top_k: only the k most likely tokens; 0: all.
            top_p: only the smallest set of tokens that has this much probability.
            seed: of the sampling, 0 to 2**64 - 1.
            stop_token_ids: stop at any of these; None: those of the model's generation config.

        Raises:
            UsageError: an argument is out of range, or the bundle holds no decoder.
            ContextError: the prompt is longer than the longest context.
            RejectError: a program is damaged.
        """
        sampling = Sampling(temperature, top_k, top_p, seed)
        return self.generate_batch(
            [prompt],
            max_new_tokens=max_new_tokens,
            sampling=[sampling],
            stop_token_ids=stop_token_ids,
        )[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        sampling: Sequence[Sampling] | None = None,
        stop_token_ids: Sequence[int] | None = None,
    ) -> list[Result]:
        """Generates from several prompts in one batch, each with its own sampling.

        Raises:
            UsageError, ContextError, RejectError: as `generate`; more prompts than the largest batch.
        """
        ids = [self._encode(prompt) for prompt in prompts]
        timers = [Timer(len(prompt)) for prompt in ids]
        tokens: list[list[int]] = [[] for _ in ids]
        reasons = [""] * len(ids)
        rows = run_rows(
            self.decoder,
            ids,
            list(sampling) if sampling is not None else [Sampling()] * len(ids),
            max_new_tokens,
            self._stop_tokens(stop_token_ids),
        )
        for step in rows:
            for row, (token, reason) in enumerate(step):
                if token is not None:
                    tokens[row].append(token)
                    timers[row].token()
                if reason is not None:
                    reasons[row] = reason
        return [
            Result(
                self._text(ids[row], tokens[row]), tuple(tokens[row]), reasons[row], timer.stats()
            )
            for row, timer in enumerate(timers)
        ]

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Iterator[Piece]:
        """Generates from one prompt and gives each token as it comes. Arguments as `generate`.

        Raises:
            UsageError, ContextError, RejectError: as `generate`, at the first piece.
        """
        ids = self._encode(prompt)
        rows = run_rows(
            self.decoder,
            [ids],
            [Sampling(temperature, top_k, top_p, seed)],
            max_new_tokens,
            self._stop_tokens(stop_token_ids),
        )
        return stream_text(rows, ids, self._tokenizer)

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Runs a program of the manifest's `[[program]]` sections.

        Args:
            name: of the program.
            *args: positional arguments, where the manifest gives a list.
            **kwargs: keyword arguments, where it gives a table. Both are nested dicts, lists and tuples
                of arrays, each anything that NumPy or DLPack reads. The bucket is the one that has
                their shapes.

        Returns:
            The results, nested as the function returned them (sequences as tuples); NumPy arrays, or
            jax.Arrays where an argument was one.

        Raises:
            UsageError: there is no such program, or no bucket of it takes these arguments.
            RejectError: the program is damaged.
        """
        return self.call_leaves(name, {**dict(pytree.leaves(args)), **dict(pytree.leaves(kwargs))})

    def call_leaves(self, name: str, given: Mapping[pytree.Path, Any]) -> Any:
        """As `call`, with the arguments flat: each array by its path. Raises as `call`."""
        values = {path: _as_numpy(value) for path, value in given.items()}
        program = self._bucket_for(name, values)
        arguments = self._programs.arguments(program.name)
        paths = [result.path for result in self._programs.results(program.name)]
        inputs = [self._device.put(values[argument.path]) for argument in arguments]
        results = self._programs[program.name].run(
            [*self._programs.weights(program.weights), *inputs]
        )
        convert = to_jax if any(map(is_jax_array, given.values())) else to_numpy
        return pytree.unflatten(paths, [convert(result) for result in results])

    def runner_with_zeros(self, program: Program) -> Callable[[], object]:
        """A function that runs a program of kind `call` on zeros and waits for it; for measuring."""
        arguments = self._programs.arguments(program.name)
        inputs = [self._device.put(aligned_zeros(a.shape, dtype_of(a.dtype))) for a in arguments]
        executable = self._programs[program.name]
        weights = self._programs.weights(program.weights)
        return lambda: to_numpy(executable.run([*weights, *inputs])[0])

    def report(self) -> tuple[ProgramReport, ...]:
        """How each program was obtained: loaded, compiled here, cached here, compiling, or unused so far."""
        return self._programs.report()

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
        return bundle.TOKENIZER_MEDIA_TYPE in self._layers

    @cached_property
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

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        layer = self._layers.get(bundle.TOKENIZER_MEDIA_TYPE)
        if layer is None:
            return None
        from prejit.runtime.tokenizer import Tokenizer  # costs 20 ms, and only text needs it

        return Tokenizer(layer.content[:], layer.path)

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self._tokenizer is None:
            raise UsageError(
                f"{self.name}: this bundle has no tokenizer, so a prompt cannot be text",
                hint="give token ids, or build from a model directory with a tokenizer.json",
            )
        return self._tokenizer.encode(prompt)

    def _text(self, prompt_ids: list[int], token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        text = self._tokenizer.stream(prompt_ids)
        return "".join(map(text.push, token_ids)) + text.finish()

    def _stop_tokens(self, token_ids: Sequence[int] | None) -> frozenset[int]:
        return frozenset(self.decoder.decoder.eos_token_ids if token_ids is None else token_ids)

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


def _as_numpy(value: Any) -> Any:
    import numpy as np

    if is_jax_array(value) or hasattr(value, "__array__") or not hasattr(value, "__dlpack__"):
        return np.asarray(value)
    return np.from_dlpack(value)
