"""A manifest as a value: what to compile and for which machines.

    [bundle]      BundleTable        name, license
    [model]       Model              source, or module, params, reads and impure; dtype,
                                     accuracy, evaluation; it needs one of the next two
    [generate]    Generate           batch, prompt, context, draft_tokens, cache_dtype, source, images
    [draft]       DraftTable         source, dtype: a smaller model that guesses tokens
    [adapters]    AdapterSlots       slots, rank, targets
    [encode]      Encode             shapes, images, heads,
                                     answers: an AnswersTable, how a causal model scores
    [mesh]        Mesh               data, tensor, axes: several devices run one program
    [[program]]   Program            name, function, args, buckets, params, static, donate, pad,
                                     mask, open_sizes, repeat, carry, shardings, reads, impure
                                     check: a ProgramCheck, reference results
    [[library]]   Library            path, handlers, targets: native code that programs call
    [[target]]    Target             name, jax, ...: see target_table.TargetTable

`reading.read_manifest` makes it from TOML. Python code makes it with `Manifest(...)`, and
`reading.check_manifest` then finds the same mistakes as in a file.
"""

from __future__ import annotations

import itertools
import keyword
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from prejit.compiler.targets.target_classes import Target
from prejit.compiler.targets.target_table import TableError, TargetTable, resolve
from prejit.runtime.errors import ManifestError
from prejit.runtime.format.arrays import Mesh
from prejit.runtime.format.release_limits import ReleaseLimits

REPEAT = "repeat"
"""The static argument that says how many steps a call runs."""
UNCHECKED = "unchecked"
"""In `pad` and `open_sizes`: the build does not compare what other sizes give with the function itself."""

STRICT = {"strict": True, "extra": "forbid"}
"""The pydantic settings of every section: no conversions and no unknown keys."""


@dataclass(frozen=True, slots=True)
class BundleTable:
    """`[bundle]`: the bundle that the build writes.

    Attributes:
        name: name of the bundle; a valid name in an OCI reference.
        license: path of the licence text, relative to the manifest.
    """

    __pydantic_config__: ClassVar = STRICT

    name: str
    license: str | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """`[model]`: a published checkpoint, or a decoder of the user.

    Attributes:
        source: a directory in the Hugging Face layout, relative to the manifest, or a .gguf file, or
            `hf://org/name@revision`. Beside `module` it gives tokenizer.json,
            generation_config.json and the chat template, and may be left out.
        module: a decoder of the user: `package.module:attribute`, or in Python the object itself. The
            attribute is an object that has the methods of a decoder, or a function or class that makes one
            without arguments.
        params: values of the parameters of `module`, which replace its own: a .safetensors file or an orbax
            directory, relative to the manifest, or in Python a pytree of arrays.
        adapters: directories of adapters in PEFT's layout, relative to the manifest. The build merges them
            into the weights of `source`, in this order.
        dtype: dtype in which the matrices are stored. Kernels round what narrow ones are multiplied with;
            a decoder of the user gets its matrices in float32 and computes as it was written.
        evaluation: path of a text, relative to the manifest, on whose last tokens accuracy is measured;
            without it, on random tokens. What comes before decides how matrices are rounded to int4, and how
            many bits those of an encoder need.
        reads: files that the code of `module` reads by other means than Python's own `open`, relative to the
            manifest: paths, glob patterns, directories. It is traced again when one of them changes.
        accuracy: whether the build measures what the dtypes cost in accuracy, and gives matrices of an
            encoder more bits than `dtype` has where its embeddings need them.
        impure: whether `module` may read the clock or draw random numbers without a seed while it is traced,
            because the program does not depend on them. Otherwise that is an error.
    """

    __pydantic_config__: ClassVar = STRICT

    source: str | None = None
    adapters: tuple[str, ...] = ()
    dtype: str = "float32"
    evaluation: str | None = None
    module: Any = None
    params: Any = None
    reads: tuple[str, ...] = ()
    accuracy: bool = True
    impure: bool = False

    @property
    def label(self) -> str:
        """The name of the model, for messages."""
        if self.module is None:
            return str(self.source)
        if isinstance(self.module, str):
            return self.module
        return str(getattr(self.module, "__name__", type(self.module).__name__))


@dataclass(frozen=True, slots=True)
class Generate:
    """`[generate]`: the buckets of a decoder.

    Attributes:
        batch: numbers of sequences that are decoded together.
        prompt: numbers of tokens that one prefill takes.
        context: lengths of the KV cache in tokens; a cache grows from one to the next as its text grows.
        draft_tokens: largest number of draft tokens (prompt lookup) that one pass verifies; 0 builds no
            programs for drafts.
        cache_dtype: dtype of the KV cache; by default bfloat16 if the `dtype` of a `source` is not float32.
        source: of an encoder-decoder: numbers of places that its encoder reads, such as tokens or frames.
        images: of a model whose prompts may hold images: numbers of tokens that one prefill with images
            takes, each at least as many as an image has. Without it the model reads texts alone.
    """

    __pydantic_config__: ClassVar = STRICT

    batch: tuple[int, ...]
    prompt: tuple[int, ...]
    context: tuple[int, ...]
    draft_tokens: int = 0
    cache_dtype: str | None = None
    source: tuple[int, ...] = ()
    images: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftTable:
    """`[draft]`: a smaller model that guesses up to `draft_tokens` tokens, which the model then verifies.

    Attributes:
        source: as of the model.
        dtype: dtype in which its matrices are stored.
    """

    __pydantic_config__: ClassVar = STRICT

    source: str
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """`[adapters]`: the LoRA adapters that a decoder takes while it runs, beside its weights.

    Attributes:
        slots: how many adapters may be loaded at a time.
        rank: the largest rank of an adapter.
        targets: the matrices that adapters may change, as PEFT's target_modules names them; empty: all of
            attention and of the MLP.
    """

    __pydantic_config__: ClassVar = STRICT

    slots: int = 8
    rank: int = 16
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswersTable:
    """`[encode.answers]`: a causal language model scores pairs by the logits of its answers.

    For a directory whose files do not say so, such as that of Qwen3-Reranker before it had modules.json.

    Attributes:
        yes: the token of relevant documents, as tokenizer.json writes it.
        no: the token whose logit is subtracted from that of `yes`. None: none is.
        template: the text of a pair, with {query}, {document} and, if calls may give one, {instruction}.
            None: the chat template, which then takes messages of the roles system, query and document.
        instruction: the instruction of calls that give none.
    """

    __pydantic_config__: ClassVar = STRICT

    yes: str
    no: str | None = None
    template: str | None = None
    instruction: str | None = None


@dataclass(frozen=True, slots=True)
class Encode:
    """`[encode]`: the buckets of an encoder.

    Attributes:
        shapes: pairs of batch and length: sentences that are encoded together, and the tokens of each.
        packed: numbers of tokens in which sentences lie one after the other, without padding between them.
        images: numbers of images that are encoded together, for a model that reads images.
        answers: how a causal language model scores pairs of texts; None: as its files say.
        heads: what BGE-M3 gives of a text beside its dense vector: `sparse`, a weight of each token, and
            `multi_vector`, a vector of each token.
    """

    __pydantic_config__: ClassVar = STRICT

    shapes: tuple[tuple[int, int], ...] = ()
    packed: tuple[int, ...] = ()
    images: tuple[int, ...] = ()
    answers: AnswersTable | None = None
    heads: tuple[Literal["sparse", "multi_vector"], ...] = ()


def names_object(text: str) -> bool:
    """Return whether a text has the form `package.module:attribute`."""
    module, _, attribute = text.partition(":")
    names = [*module.split("."), *attribute.split(".")]
    return all(name.isidentifier() and not keyword.iskeyword(name) for name in names)


@dataclass(frozen=True, slots=True)
class ProgramCheck:
    """`[program.check]`: results that a program must return. The build fails where they differ.

    Attributes:
        function: `package.module:attribute`, or in Python the object itself: a function that takes what the
            function of the program takes, params included, as NumPy arrays, and returns what it returns. It
            is compared at each bucket, here and by `prejit verify --run`.
        files: .npz files, relative to the manifest, with arguments and results of the program as `args.NAME`
            and `results.NAME`, named as by `prejit call`; the shapes must be those of a bucket. The build
            alone compares with them.
        tolerance: results may differ by this share of their size, and of the mean size of all elements of
            the result. Whole numbers must be equal.
    """

    __pydantic_config__: ClassVar = STRICT

    function: Any = None
    files: tuple[str, ...] = ()
    tolerance: float = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A function of the user: a `[[program]]` section, or a Python object.

    Attributes:
        name: name of the program; unique in the bundle.
        fn: a function, or a module of flax.linen, flax.nnx or equinox: the object itself, or
            `package.module:attribute`; or the path of a file: a `jax.export` artifact or StableHLO.
        args: the arguments: a dict of those by name or a list of those by position. A leaf is a shape string
            such as `float32[{batch}, 128]`, an array, a jax.ShapeDtypeStruct or a number. Or a function (the
            object or `package.module:attribute`) that takes a size for each variable of `buckets` and returns
            such arguments as examples. None: those of the file.
        buckets: the sizes that each variable of args takes.
        params: the first argument of the function: a pytree of arrays, or the path of a .safetensors file
            or orbax directory, relative to the manifest. None: the function takes `args` alone, or is a
            module with parameters of its own.
        static: the values that each static argument takes: texts, numbers, booleans, and from Python any that
            has a hash and that another process can compare, such as frozen dataclasses, enums and functions.
            The function gets them by name, as Python values, and there is a program for each.
        donate: names or positions of arguments whose memory the results may reuse.
        pad: variables of `buckets` that a call may have less of: arrays are padded with zeros, and results
            are cut. What the function returns for a row must not depend on padding, or it must take a mask:
            the build tries some sizes, and refuses what differs. "unchecked" in place of the list means all
            variables, and among them in the list those beside it, without this check.
        mask: name or position of a boolean argument that is true for what the caller gave and false for
            padding. Callers may leave it out.
        open_sizes: variables of `buckets` that a call may give other sizes. The server compiles a new size
            once, from a program with symbolic sizes in the bundle. For other variables it is an error. The
            build tries some sizes; "unchecked" means the same as for pad.
        repeat: numbers of steps that one call runs, each on what the step before returned of the arguments in
            `carry`. A call chooses one by the static argument `repeat`; each has a program of its own.
        carry: names or positions of the arguments that a repeated function returns anew.
        shardings: for arrays that a mesh splits, the mesh axis of each dimension, "a+b" for two, or "", by
            the dotted path of an argument, of `params` or of `result`, or of a part of them. All arrays below
            that path are split so. All others are whole on every device.
        reads: files that the function reads by other means than Python's own `open`, relative to the
            manifest: paths, glob patterns, directories. It is traced again when one of them changes.
        impure: whether the function may read the clock or draw random numbers without a seed while it is
            traced, because the program does not depend on them. Otherwise that is an error.
        check: results that the build compares with; None: those of its own executable alone are known.
        mesh: in Python alone, the mesh of `shardings`; None: that of the manifest.
    """

    name: str
    fn: str | Callable[..., Any]
    args: Any = None
    buckets: Mapping[str, Sequence[int]] = field(default_factory=dict)
    params: Any = None
    static: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    donate: Sequence[str | int] = ()
    pad: Sequence[str] | str = ()
    mask: str | int | None = None
    open_sizes: Sequence[str] | str = ()
    repeat: Sequence[int] = ()
    carry: Sequence[str | int] = ()
    shardings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    reads: Sequence[str] = ()
    impure: bool = False
    check: ProgramCheck | None = None
    mesh: Mesh | None = None

    @property
    def is_file(self) -> bool:
        """True if the program is read from a file."""
        return isinstance(self.fn, str) and not names_object(self.fn)

    @property
    def label(self) -> str:
        """The name of the function, for messages."""
        return self.fn if isinstance(self.fn, str) else getattr(self.fn, "__qualname__", self.name)

    @property
    def padded(self) -> tuple[str, ...]:
        """The variables that `pad` names."""
        return self._variables(self.pad)

    @property
    def opened(self) -> tuple[str, ...]:
        """The variables that `open_sizes` names."""
        return self._variables(self.open_sizes)

    def _variables(self, named: Sequence[str] | str) -> tuple[str, ...]:
        every = self.buckets if named == UNCHECKED else named
        return tuple(name for name in every if name != UNCHECKED)

    def expand(self) -> tuple[tuple[dict[str, int], dict[str, Any]], ...]:
        """Return every combination of bucket sizes and static values, first variable outermost."""

        def combinations(of: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
            return [
                dict(zip(of, values, strict=True)) for values in itertools.product(*of.values())
            ]

        static = {**self.static, REPEAT: self.repeat} if self.repeat else self.static
        return tuple(itertools.product(combinations(self.buckets), combinations(static)))


@dataclass(frozen=True, slots=True)
class Library:
    """`[[library]]`: a shared library with XLA FFI handlers, which programs call by `jax.ffi.ffi_call`.

    Attributes:
        path: the library, relative to the manifest: an ELF file for Linux on x86-64 or AArch64.
        handlers: for each name that programs give `jax.ffi.ffi_call`, the symbol that the library exports.
        targets: names of the targets that it is for, whose CPU extensions it may use. Default: all CPU
            targets of its architecture.
    """

    __pydantic_config__: ClassVar = STRICT

    path: str
    handlers: dict[str, str]
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Manifest:
    """A manifest: the programs to compile, and the machines to compile them for.

    Attributes:
        bundle: the bundle that the build writes.
        model: a decoder, with `generate`, or an encoder, with `encode`.
        generate: the buckets of a decoder.
        draft: the model that guesses tokens for a decoder; None: none.
        adapters: the adapters that a decoder takes while it runs; None: none.
        encode: the buckets of an encoder.
        slo: the limits that a release has to keep; None: none but the defaults.
        mesh: the devices that run a program together, of a decoder or of the user; None: one device.
        programs: functions of the user.
        libraries: native code that the functions call.
        targets: the machines to compile for.
        path: the TOML file; None: the manifest was made in Python.
    """

    bundle: BundleTable
    model: Model | None
    generate: Generate | None
    draft: DraftTable | None
    adapters: AdapterSlots | None
    encode: Encode | None
    slo: ReleaseLimits | None
    mesh: Mesh | None
    programs: tuple[Program, ...]
    libraries: tuple[Library, ...]
    targets: tuple[Target, ...]
    path: Path | None

    def __init__(
        self,
        bundle: BundleTable | str,
        *,
        targets: str | TargetTable | Target | Iterable[str | TargetTable | Target],
        programs: Program | Iterable[Program] = (),
        libraries: Library | Iterable[Library] = (),
        model: Model | None = None,
        generate: Generate | None = None,
        draft: DraftTable | None = None,
        adapters: AdapterSlots | None = None,
        encode: Encode | None = None,
        slo: ReleaseLimits | None = None,
        mesh: Mesh | None = None,
        path: Path | None = None,
    ) -> None:
        """Make a manifest. Paths in it are relative to `path`, else to the working directory.

        `bundle` may be a name, and targets may be names as `prejit targets` lists them. One target, program
        or library is as good as a list of one. See the attributes.

        Raises:
            ManifestError: a target does not exist, or the mesh is no Mesh.
        """
        if mesh is not None and not isinstance(mesh, Mesh):
            hint = "Mesh(data=2, tensor=4), or with other axes Mesh.of(fsdp=2, tp=4)"
            raise ManifestError(f"mesh: expected a Mesh, found {mesh!r}", hint=hint)
        listed_programs = _listed(programs, Program)
        for program in listed_programs:
            if isinstance(program, Program) and program.mesh is not None:
                if mesh not in (None, program.mesh):
                    found = f"{mesh} and, of program {program.name!r}, {program.mesh}"
                    raise ManifestError(f"mesh: expected one mesh, found {found}")
                mesh = program.mesh
        for name, value in {
            "bundle": BundleTable(bundle) if isinstance(bundle, str) else bundle,
            "model": model,
            "generate": generate,
            "draft": draft,
            "adapters": adapters,
            "encode": encode,
            "slo": slo,
            "mesh": mesh if mesh is not None and mesh.size > 1 else None,
            "programs": listed_programs,
            "libraries": _listed(libraries, Library),
            "path": path,
        }.items():
            object.__setattr__(self, name, value)
        listed = enumerate(_listed(targets, str, TargetTable, Target))
        object.__setattr__(self, "targets", tuple(self._target(*each) for each in listed))

    @property
    def has_own_model(self) -> bool:
        """True if the model is a decoder of the user."""
        return self.model is not None and self.model.module is not None

    @property
    def of_draft(self) -> Manifest | None:
        """The manifest that has the draft model as its model, in the smallest batch; None: there is none."""
        if self.draft is None or self.generate is None:
            return None
        sizes = replace(self.generate, batch=self.generate.batch[:1], draft_tokens=0)
        return Manifest(
            self.bundle,
            targets=self.targets,
            model=Model(self.draft.source, dtype=self.draft.dtype),
            generate=sizes,
            path=self.path,
        )

    @property
    def reads_images(self) -> bool:
        """True if the model reads images."""
        model = self.encode or self.generate
        return model is not None and bool(model.images)

    @property
    def where(self) -> str:
        """The manifest's file, or its bundle's name: the start of an error message."""
        return f"manifest {self.bundle.name!r}" if self.path is None else str(self.path)

    @property
    def directory(self) -> Path:
        """The directory that the manifest's paths are relative to."""
        return Path() if self.path is None else self.path.parent

    def section(self, name: str) -> Program:
        """Return the [[program]] of a name."""
        return next(program for program in self.programs if program.name == name)

    def resolve(self, path: str) -> Path:
        """Return the absolute form of a path in the manifest."""
        return Path(os.path.abspath(self.directory / path))

    def _target(self, place: int, given: str | TargetTable | Target) -> Target:
        if isinstance(given, Target):
            return given
        table = TargetTable(given) if isinstance(given, str) else given
        try:
            return resolve(table, self.directory, self.mesh)
        except TableError as error:
            raise ManifestError(
                f"{self.where}: target[{place}].{error.key}: {error}",
                hint="`prejit targets` lists the names",
            ) from error


def _listed(given: Any, *kinds: type[Any]) -> tuple[Any, ...]:
    return (given,) if isinstance(given, kinds) else tuple(given)
