"""The commands that read or run a bundle. Data goes to stdout; everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from prejit.runtime.base.process import seconds_since_exec
from prejit.runtime.base.tables import size, table
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.cli.tables import accuracy_table, forms_table
from prejit.runtime.errors import NumbersError, PrejitWarning, StoreError, UsageError, printable
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.blobs import check_blobs, read_whole
from prejit.runtime.format.checks import check_digest, target_of
from prejit.runtime.format.config_checks import check_array, check_arrays, check_weight_sets
from prejit.runtime.format.layer_checks import check_chat, unpack
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import (
    BUNDLE_NAME,
    CHAT_MEDIA_TYPE,
    EXECUTABLES_MEDIA_TYPE,
    GENERATION_MEDIA_TYPE,
    KERNELS_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.opening import (
    Contents,
    Target,
    match,
    open_index,
    read_contents,
    read_kernels,
)
from prejit.runtime.format.safetensors import check_weights
from prejit.runtime.format.schema import Index, Segment
from prejit.runtime.generation.defaults import check_generation
from prejit.runtime.loader import load
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.verdict import Axis, Verdict

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.runtime.fleet.report import Report
    from prejit.runtime.generation.defaults import Defaults
    from prejit.runtime.generation.generate import Piece


def inspect(options: Namespace) -> int:
    """What a bundle holds."""

    def read(
        layout: Layout, index: Index, digest: str
    ) -> tuple[str, tuple[Target, ...], list[Contents], Defaults | None]:
        targets = match(layout, index, Fingerprint.current())
        contents = [read_contents(layout, target) for target in targets]
        return digest, targets, contents, _defaults(layout, contents[0])

    digest, targets, contents, defaults = read_whole(options.bundle, read)
    if options.json:
        described = [
            {
                "config": json.loads(to_json(c.config)),
                "layers": [asdict(x) for x in c.manifest.layers],
            }
            for c in contents
        ]
        described_defaults = None if defaults is None else asdict(defaults)
        return _print_json({"digest": digest, "targets": described, "defaults": described_defaults})
    first = contents[0].config
    _say(f"{first.bundle}  {digest}")
    _say(table(["built with", "version"], sorted(first.versions.items())))
    if (portable := first.portable) is not None:
        until = f", readable until {portable.readable_until}" if portable.readable_until else ""
        _say(f"portable programs: jax {portable.jax}, StableHLO {portable.stablehlo}{until}")
    if defaults is not None:
        values = (f"{name} {value}" for name, value in defaults.options().items())
        _say(f"generates by default with: {', '.join(values) or 'the most likely tokens'}")
    if first.accuracy is not None:
        _say(accuracy_table(first.accuracy))
    layers = {layer.digest: layer for c in contents for layer in c.manifest.layers}
    _say(
        table(
            ["layer", "size"], [(_layer_name(x.mediaType), size(x.size)) for x in layers.values()]
        )
    )
    for target, content in zip(targets, contents, strict=True):
        fits = "fits this machine" if target.verdict.matches else target.verdict.reason()
        _say(f"\n{target.name}: {fits}")
        if (kernels := content.config.kernels) is not None:
            held = content.manifest.layer(KERNELS_MEDIA_TYPE).size
            names = ", ".join(kernels.handlers)
            _say(f"kernels {kernels.level}, {kernels.compiler}, {size(held)}: {names}")
        _say(
            table(
                ["program", "kind", "executable", "StableHLO", "temporary memory"],
                [
                    (
                        p.name,
                        p.kind,
                        size(p.executable.size),
                        size(p.portable.size),
                        size(p.memory.temp_bytes),
                    )
                    for p in content.config.programs
                ],
            )
        )
        if content.config.forms:
            _say(forms_table(content.config.forms))
    return 0


def _defaults(layout: Layout, content: Contents) -> Defaults | None:
    """The defaults of a decoder; None: the bundle holds none.

    Raises:
        RejectError: the generation config is damaged.
    """
    manifest = content.manifest
    if content.config.decoder is None:
        return None
    if not manifest.has_layer(GENERATION_MEDIA_TYPE):
        from prejit.runtime.generation.defaults import (
            Defaults,
        )  # NumPy, which no other command here needs

        return Defaults()
    at = manifest.layer(GENERATION_MEDIA_TYPE)
    read, path = layout.read_blob(at.digest, at.size), layout.blob_path(at.digest)
    check_digest(read, at.digest, path)
    return check_generation(read, content.config.format, path)


def verify(options: Namespace) -> int:
    """Checks every byte: digests of all blobs, every frame of every pack, each line of each table."""
    started = time.perf_counter()
    digest, targets, programs, hashed = read_whole(options.bundle, _verify)
    seconds = time.perf_counter() - started
    if options.json:
        found = {"digest": digest, "targets": targets, "programs": programs, "bytes": hashed}
        return _print_json({**found, "seconds": round(seconds, 3)})
    _say(
        f"{options.bundle}: ok: {targets} targets, {programs} programs, {size(hashed)} hashed "
        f"in {seconds:.1f} s\n{digest}"
    )
    return 0


def _verify(layout: Layout, index: Index, digest: str) -> tuple[str, int, int, int]:
    """Checks a bundle; gives its digest and the numbers of targets, programs and bytes."""
    targets = match(layout, index, Fingerprint.current())
    contents = [read_contents(layout, target) for target in targets]
    blobs = check_blobs(layout, [content.manifest for content in contents], receipts=None)
    unpacked = set[tuple[str, Segment]]()
    for content in contents:
        manifest, config = content.manifest, content.config
        layers = {
            at.mediaType: (layout.map_blob(at.digest, at.size), layout.blob_path(at.digest))
            for at in manifest.layers
        }
        for media_type in (EXECUTABLES_MEDIA_TYPE, PORTABLE_MEDIA_TYPE):
            pack, pack_path = layers[media_type]
            for program in config.programs:
                executables = media_type == EXECUTABLES_MEDIA_TYPE
                segment = program.executable if executables else program.portable
                if (pack_path, segment) not in unpacked:  # targets share portable programs
                    frame = pack[segment.offset : segment.offset + segment.size]
                    unpack(frame, segment, pack_path)
                    unpacked.add((pack_path, segment))
        for program in config.programs:
            at = f"{layout.blob_path(manifest.config.digest)}: {program.name}"
            for texts in (program.arguments, program.results):
                check_arrays(texts, program.kind, config.mesh, at)
        read_kernels(layout, config, manifest)
        shapes: dict[str, tuple[int, ...]] = {}
        at_fault = layout.blob_path(manifest.config.digest)
        if WEIGHTS_MEDIA_TYPE in layers:
            weights, at_fault = layers[WEIGHTS_MEDIA_TYPE]
            tensors = check_weights(memoryview(weights), at_fault)
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
        check_weight_sets(config, shapes, at_fault)
        if CHAT_MEDIA_TYPE in layers:
            templates, chat_path = layers[CHAT_MEDIA_TYPE]
            check_chat(bytes(templates), chat_path)
        _defaults(layout, content)
    programs = sum(len(content.config.programs) for content in contents)
    return digest, len(targets), programs, blobs.hashed_bytes


def fingerprint(options: Namespace) -> int:
    """What this machine is."""
    print(to_json(Fingerprint.current()).decode())
    return 0


def explain(options: Namespace) -> int:
    """Each target's verdict, axis by axis; or what becomes of each machine of a fleet."""
    if options.fleet is not None:
        return _explain_fleet(options)
    if options.page is not None:
        raise UsageError("--page: expected --fleet DIR as well, found none")
    machine = _machine(options) or Fingerprint.current()
    with Layout(options.bundle) as layout:
        index, _ = open_index(layout)
        targets = match(layout, index, machine)
    chosen = next((target.name for target in targets if target.verdict.matches), None)
    if options.json:
        _print_json(
            {
                "target": chosen,
                "verdicts": [{"matches": t.verdict.matches, **asdict(t.verdict)} for t in targets],
            }
        )
        return 0 if chosen else 3
    rows = [
        (target.name, a.name, a.rule, "yes" if a.matches else "NO", a.needed, a.found)
        for target in targets
        for a in _telling_axes(target.verdict)
    ]
    _say(table(["target", "axis", "rule", "fits", "needed", "found"], rows))
    where = (
        f"the machine of {options.fingerprint}"
        if options.fingerprint is not None
        else "this machine"
    )
    if chosen:
        _say(f"\n{where} loads {chosen}: nothing is compiled")
        return 0
    _say(f"\n{where} is none of the targets: every program would be compiled there")
    return 3


def _telling_axes(verdict: Verdict) -> tuple[Axis, ...]:
    """All axes; of a target for another platform that one alone, since the others follow from it."""
    return tuple(a for a in verdict.axes if a.name == "platform" and not a.matches) or verdict.axes


def _explain_fleet(options: Namespace) -> int:
    from prejit.runtime.fleet.machines import read_fleet, unread
    from prejit.runtime.fleet.report import explain_fleet

    with Layout(options.bundle) as layout:
        index, digest = open_index(layout)
        where = str(layout.path / "index.json")
        targets = [target_of(descriptor, where) for descriptor in index.manifests]
    fleet = read_fleet(options.fleet)
    report = explain_fleet(targets, fleet.machines, fleet.unreadable)
    if options.page is not None:
        from prejit.runtime.fleet.page import page

        html = page(index.annotations[BUNDLE_NAME], digest, options.fleet, report)
        try:
            Path(options.page).write_bytes(html.encode("utf-8", "backslashreplace"))
        except OSError as error:
            raise StoreError(f"{options.page}: cannot write the page: {error.strerror}") from error
    if options.json:
        _print_json(report.described())
    else:
        _say(_fleet_text(report))
    if fleet.unreadable:
        sys.stdout.flush()  # the report goes before what it does not tell of
        raise unread(fleet.unreadable, len(fleet.machines) + len(fleet.unreadable))
    return 3 if options.require_aot and report.fallen_back else 0


def _fleet_text(report: Report) -> str:
    """A fleet's report for a terminal."""
    from prejit.runtime.fleet.machines import few

    parts = [
        table(
            ["machines", "loads", "which", "closest", "why not"],
            [
                (
                    str(len(group.machines)),
                    "nothing: compiles" if group.mismatches else group.target,
                    few(group.machines),
                    group.target if group.mismatches else "",
                    group.reason(),
                )
                for group in report.groups
            ],
        ),
        table(["target", "machines"], [(name, str(n)) for name, n in report.serves.items()]),
    ]
    total = len(report.verdicts)
    if not report.fallen_back:
        return "\n\n".join([*parts, f"all {total} machines load a target: nothing is compiled"])
    parts.append(
        f"{report.fallen_back} of {total} machines are none of the targets: every program would be "
        "compiled there"
    )
    if report.additions:
        parts.append(f"{report.advice()} (the path of a file is relative to the manifest):")
        parts += [
            f"# serves {len(addition.machines)}: {few(addition.machines)}\n{addition.toml()}"
            for addition in report.additions
        ]
    if report.beyond_help:
        parts.append("no target that can be added serves:")
        parts.append(
            table(
                ["machines", "which", "what stands in the way"],
                [
                    (str(len(group.machines)), few(group.machines), group.reason())
                    for group in report.beyond_help
                ],
            )
        )
    return "\n\n".join(parts)


def tune(options: Namespace) -> int:
    """Records what XLA measures on this machine's GPU."""
    from prejit.runtime.cli import tuning

    measured = tuning.tune(options.bundle, lambda line: _say(line, file=sys.stderr, flush=True))
    tuning.write(measured, Path(options.output))
    _say(
        f"wrote {options.output} for {measured.machine.device_kind}; name it in the manifest:\n"
        f'  [[target]]\n  tuning = "{options.output}"',
        file=sys.stderr,
    )
    return 0


_GENERATE_OPTIONS = (
    *("max_new_tokens", "stop", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "seed", "logprobs", "prompt_lookup"),
)


def generate(options: Namespace) -> int:
    """Generates and prints text as it comes."""
    bundle = _load(options)
    prompt = _prompt(bundle, options)
    pieces: list[Piece] = []
    first_seconds = 0.0
    # What a model writes is data, and only a terminal would obey it.
    terminal = sys.stdout is not None and sys.stdout.isatty()
    started = time.perf_counter()
    asked = {name: getattr(options, name) for name in _GENERATE_OPTIONS}
    given = {name: value for name, value in asked.items() if value is not None}
    for piece in bundle.stream(prompt, **given):
        if not pieces:
            first_seconds, started = seconds_since_exec(), time.perf_counter()
        pieces.append(piece)
        if not options.json:
            text = (
                piece.text
                if bundle.has_tokenizer
                else f"{piece.token_id} " * (piece.token_id is not None)
            )
            print(printable(text) if terminal else text, end="", flush=True)
    seconds = time.perf_counter() - started
    tokens = [piece.token_id for piece in pieces if piece.token_id is not None]
    rate = (len(tokens) - 1) / seconds if len(tokens) > 1 else 0.0
    stats = pieces[-1].stats
    assert stats is not None
    if options.json:
        _print_json(
            {
                "text": "".join(piece.text for piece in pieces),
                "token_ids": tokens,
                "finish_reason": pieces[-1].finish_reason,
                "logprobs": [asdict(p.logprob) for p in pieces if p.logprob is not None],
                "stats": asdict(stats),
                "first_token_seconds_since_exec": round(first_seconds, 4),
                "load_seconds": round(bundle.load_seconds, 4),
                "tokens_per_second": round(rate, 2),
                "target": bundle.target,
                "matched": bundle.matched,
                "programs": [asdict(report) for report in bundle.report()],
            }
        )
    else:
        _say()
    if pieces[-1].finish_reason == "nan":
        raise NumbersError(
            f"{bundle.name}: expected logits that are numbers, found NaN or infinity after {len(tokens)} "
            "new tokens",
            hint="the model's weights are broken, or too large for the cache_dtype of the manifest",
        )
    if options.stats and not options.json:
        used = [report for report in bundle.report() if report.source != "unused"]
        compiled = [report.program for report in used if report.source == "compiled"]
        rows = [(r.program, r.source, f"{r.seconds * 1e3:.0f} ms") for r in used]
        _say(f"\n{table(['program', 'how', 'took'], rows)}", file=sys.stderr)
        _say(
            f"\n{bundle.name} for {bundle.target}, {bundle.digest[:19]}\n"
            f"first token {first_seconds:.2f} s after the start of the process, "
            f"then {rate:.0f} tokens a second; {stats.new_tokens} tokens in {stats.passes} passes, "
            f"{stats.padding:.0%} padding\n"
            f"compiled: {', '.join(compiled) or 'nothing'}",
            file=sys.stderr,
        )
    return 0


def encode(options: Namespace) -> int:
    """Prints the embeddings of sentences: a line of numbers each, or JSON with the accounting."""
    bundle = _load(options)
    with _warnings_on_stderr():
        encoded = bundle.encode_batch(options.text, on_too_long=options.on_too_long)
    rows = encoded.embeddings.tolist()
    stats = asdict(encoded.stats)
    if options.json:
        return _print_json(
            {
                "embeddings": rows,
                "stats": stats,
                "load_seconds": round(bundle.load_seconds, 4),
                "first_embedding_seconds_since_exec": round(seconds_since_exec(), 4),
                "target": bundle.target,
                "matched": bundle.matched,
            }
        )
    for row in rows:
        _say(" ".join(f"{value:.6g}" for value in row))
    if options.stats:
        used = ", ".join(f"{runs} x {bucket}" for bucket, runs in encoded.stats.buckets.items())
        _say(
            f"{encoded.stats.tokens} tokens of {len(rows)} sentences in {used}; "
            f"{encoded.stats.padding:.0%} padding; {encoded.stats.run_seconds * 1e3:.1f} ms",
            file=sys.stderr,
        )
    return 0


def call(options: Namespace) -> int:
    """Runs a program on .npy files."""
    import numpy as np

    from prejit.runtime.programs import pytree

    files = _read_arguments(options.arg)
    bundle = _load(options)
    given = _by_path(files, _arguments_of(bundle, options.program), options.program)
    result = bundle.call_leaves(options.program, given)
    directory = Path(options.output)
    written = {}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, value in pytree.leaves(result):
            # Names come out of the bundle: none may lead out of the directory.
            name = pytree.dotted(path) or "result"
            np.save(directory / f"{name}.npy", _as_numpy_writes(value))
            written[name] = {"dtype": str(value.dtype), "shape": list(value.shape)}
    except OSError as error:
        raise StoreError(f"{directory}: cannot write results: {error}") from error
    if options.json:
        return _print_json({"results": written, "programs": [asdict(r) for r in bundle.report()]})
    for name, array in written.items():
        _say(f"{directory / name}.npy  {array['dtype']}{array['shape']}")
    return 0


def _as_numpy_writes(value: Any) -> Any:
    """float8_e5m2 calls itself a float of one byte, which np.load refuses: it goes as bytes, like its kin."""
    import numpy as np

    try:
        np.dtype(value.dtype.str)
    except TypeError:
        return value.view(f"V{value.dtype.itemsize}")
    return value


def _read_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """The arrays of `--arg NAME=FILE`, by name."""
    from numpy.lib import format as npy

    given: dict[str, Any] = {}
    for text in texts:
        name, separator, file = text.partition("=")
        if not separator or not name:
            raise UsageError(f"--arg: expected NAME=FILE, found {text!r}")
        if name in given:
            raise UsageError(
                f"--arg: expected each name once, found {name!r} twice",
                hint="a part of a name that is a number is a place in a sequence",
            )
        try:
            with open(file, "rb") as opened:
                given[name] = npy.read_array(opened, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise StoreError(
                f"{file}: cannot read an array: {error}", hint="write it with numpy.save"
            ) from error
    return given


def _arguments_of(bundle: Bundle, name: str) -> list[Array]:
    """The arguments of a program, of all its buckets."""
    config = bundle.config
    return [
        check_array(text, config.mesh, f"{config.bundle}: program table: {program.name}")
        for program in config.programs
        if program.name.partition("/")[0] == name
        for text in program.arguments
    ]


def _by_path(
    files: Mapping[str, Any], arguments: Sequence[Array], program: str
) -> dict[tuple[str | int, ...], Any]:
    """Arrays by the path of their argument, as the dtypes that arguments have.

    .npy files know bfloat16 and its like only as bytes of some width.

    Raises:
        UsageError: the program has no argument of such a name.
    """
    from prejit.runtime.device.dtypes import dtype_of
    from prejit.runtime.programs import pytree

    named = {pytree.dotted(argument.path): argument for argument in arguments}
    given: dict[tuple[str | int, ...], Any] = {}
    for name, value in files.items():
        if (argument := named.get(name)) is None:
            if not named:  # no such program, or it takes nothing: the call says so
                return {(name,): value}
            raise UsageError(
                f"--arg: expected a name of an argument of {program!r}, found {name!r}",
                hint=f"they are: {', '.join(named)}; a dot inside of a key is written %2E",
            )
        dtype = dtype_of(argument.dtype)
        as_bytes = value.dtype.kind == "V" and dtype.itemsize == value.dtype.itemsize
        given[argument.path] = value.view(dtype) if as_bytes else value
    return given


def bench(options: Namespace) -> int:
    """Measures a bundle; compares it with another or with a saved baseline."""
    from prejit.runtime.bench import measure as measuring
    from prejit.runtime.bench import report as reports
    from prejit.runtime.bench.page import page

    for name, least in (("runs", 1), ("seconds", 0), ("tolerance", 0)):
        value = getattr(options, name)
        if not least <= value < float("inf"):
            raise UsageError(f"--{name}: expected {least} or more, found {value}")
    baseline = reports.read(options.baseline) if options.baseline is not None else None
    paths = [options.bundle, *([] if options.against is None else [options.against])]
    with _progress() as say:
        report, comparison = measuring.judge(
            [measuring.Setup(path, options.require_aot, options.fingerprint) for path in paths],
            [_load(options, path) for path in paths],
            baseline,
            other=options.baseline if options.against is None else options.against,
            runs=options.runs,
            seconds=options.seconds,
            tolerance=options.tolerance / 100,
            say=say,
        )
    described = {**report.described(), "comparison": asdict(comparison) if comparison else None}
    if options.output is not None:
        _write_text(options.output, json.dumps(described, indent=1) + "\n")
    if options.page is not None:
        _write_text(options.page, page(report, comparison))
    if options.json:
        _print_json(described)
        for note in reports.notes(comparison) if comparison is not None else ():
            _say(f"note: {note}", file=sys.stderr)
    else:
        _say(reports.text(report, comparison))
    if comparison is not None and comparison.regressions:
        raise reports.regression(comparison)
    return 0


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Gives what shows a line on stderr: over the last one, or now and then where that is a file."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    shown = float("-inf")

    def say(line: str) -> None:
        nonlocal shown
        if terminal:
            print(f"\r\x1b[K{printable(line[:79])}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - shown > 5:
            shown = time.monotonic()
            _say(line, file=sys.stderr, flush=True)

    try:
        yield say
    finally:
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _write_text(path: str, text: str) -> None:
    try:
        Path(path).write_bytes(text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise StoreError(f"{path}: cannot write: {error.strerror}") from error


@contextlib.contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Our warnings as a command prints them."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", PrejitWarning)  # whatever PYTHONWARNINGS says
        warnings.showwarning = lambda message, *_, **__: _say(
            f"warning: {message}", file=sys.stderr
        )
        yield


def _load(options: Namespace, path: str | None = None) -> Bundle:
    with _warnings_on_stderr():
        return load(
            options.bundle if path is None else path,
            on_mismatch="error" if options.require_aot else "jit",
            fingerprint=_machine(options),
        )


def _machine(options: Namespace) -> Fingerprint | None:
    return Fingerprint.read(options.fingerprint) if options.fingerprint is not None else None


def _prompt(bundle: Bundle, options: Namespace) -> str | list[int]:
    if options.chat is not None:
        return bundle.apply_chat_template([{"role": "user", "content": options.chat}])
    prompt: str | None = options.prompt
    return _token_ids(options.prompt_ids) if prompt is None else prompt


def _token_ids(text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError as error:
        raise UsageError(
            f"--prompt-ids: expected integers separated by commas, found {text!r:.80}"
        ) from error


def _say(text: str = "", *, file: TextIO | None = None, flush: bool = False) -> None:
    """Print text for people. Names in it may come out of a bundle, and move no cursor."""
    print(printable(text), file=file, flush=flush)


def _print_json(value: Any) -> int:
    print(json.dumps(value, indent=2))
    return 0


def _layer_name(media_type: str) -> str:
    return media_type.removeprefix("application/vnd.prejit.")
