"""`prejit call`: run a program of a [[program]] section on .npy files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prejit.runtime.base.files import store_errors
from prejit.runtime.base.process_facts import importing
from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.cli.command_options import (
    BUNDLE,
    CHECK_FINITE,
    DIR,
    JSON,
    STATS,
    load_bundle,
    loads,
)
from prejit.runtime.cli.output import print_json, print_start, print_text
from prejit.runtime.errors import StoreError, UsageError
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.checks.program_table import check_array

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle


@click.command(
    epilog="Examples:\n\n\b\n  prejit call artifacts/score score --arg x=x.npy -o results"
)
@BUNDLE
@click.argument("program", metavar="PROGRAM", help="Name of the program in the manifest.")
@click.option(
    "--arg",
    multiple=True,
    metavar="NAME=FILE",
    help="An argument; NAME may be a path such as batch.tokens or layers.0 (a dot in a key is %2E).",
)
@click.option(
    "--static",
    multiple=True,
    metavar="NAME=VALUE",
    help="A static argument; VALUE is JSON, or else text.",
)
@click.option(
    "-o", "--output", **DIR, required=True, help="Directory for the results, one .npy file each."
)
@CHECK_FINITE
@STATS
@loads
@JSON
def call(
    path: str,
    program: str,
    arg: tuple[str, ...],
    static: tuple[str, ...],
    output: str,
    check_finite: bool,
    stats: bool,
    as_json: bool,
    **loading: Any,
) -> int:
    """Run a program of a [[program]] section on .npy files, and write each result to a .npy file."""
    with importing():
        import numpy as np

        from prejit.runtime.programs import pytree

    files = _read_arguments(arg)
    bundle = load_bundle(path, **loading)
    given = _by_path(files, _arguments_of(bundle, program), program)
    directory = Path(output)
    with store_errors(directory, "write results"):
        directory.mkdir(parents=True, exist_ok=True)
    chosen, results = bundle.call_by_path(program, given, _read_static(static, bundle, program))
    if check_finite:  # of what the caller gave: padding may give infinities
        from prejit.runtime.programs.watched_runs import refuse_odd

        for place, value in results.items():
            refuse_odd(f"{bundle.name}: {chosen.program.name}", place, value)
    written = {}
    for place, value in results.items():
        # Names come from the bundle. `dotted` escapes them, so none leads out of the directory.
        name = pytree.dotted(place) or "result"
        file = directory / f"{name}.npy"
        with store_errors(file, "write a result"):
            np.save(file, _as_numpy_writes(value))
        written[name] = {"dtype": str(value.dtype), "shape": list(value.shape)}
    if as_json:
        print_json(
            {
                "results": written,
                "program": chosen.program.name,
                "padding": chosen.padding,
                "programs": [asdict(report) for report in bundle.report()],
                "start": asdict(bundle.start_report()),
            }
        )
        return 0
    for name, array in written.items():
        print_text(f"{directory / name}.npy  {array['dtype']}{array['shape']}")
    if stats:
        print_start(bundle.start_report())
    return 0


def _as_numpy_writes(value: Any) -> Any:
    """Return a value that `np.load` can read back.

    float8_e5m2 describes itself as a one-byte float, which NumPy does not know. It goes as raw bytes, as
    the other float8 types are.
    """
    import numpy as np

    try:
        np.dtype(value.dtype.str)
    except TypeError:
        return value.view(f"V{value.dtype.itemsize}")
    return value


def _read_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Return the arrays of all `--arg NAME=FILE` options by name."""
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
        hint = "write it with numpy.save"
        try:
            with store_errors(file, "read an array", hint=hint), open(file, "rb") as opened:
                given[name] = npy.read_array(opened, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise StoreError(f"{file}: cannot read an array: {error}", hint=hint) from error
    return given


def _read_static(texts: Sequence[str], bundle: Bundle, program: str) -> dict[str, Any]:
    """Return the values of all `--static NAME=VALUE` options by name, as JSON or else as text."""
    given: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise UsageError(f"--static: expected NAME=VALUE, found {text!r}")
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
    known = {
        name
        for entry in bundle.config.programs
        if entry.function == program
        for name in entry.static or ()
    }
    if unknown := given.keys() - known:
        raise UsageError(
            f"--static: expected a name of a static argument of {program!r}, found {min(unknown)!r}"
            + did_you_mean(min(unknown), known),
            hint=f"they are: {', '.join(sorted(known)) or 'none'}",
        )
    return given


def _arguments_of(bundle: Bundle, name: str) -> list[Array]:
    """Return the arguments of a program, of all its buckets."""
    config = bundle.config
    return [
        check_array(text, config.mesh, f"{config.bundle}: program table: {program.name}")
        for program in config.programs
        if program.function == name
        for text in program.arguments
    ]


def _by_path(
    files: Mapping[str, Any], arguments: Sequence[Array], program: str
) -> dict[tuple[str | int, ...], Any]:
    """Return the arrays by the path of their argument, in the dtypes that the arguments have.

    A .npy file stores bfloat16 and other types of ml_dtypes as raw bytes.
    """
    from prejit.runtime.device.transfer import dtype_of
    from prejit.runtime.programs import pytree

    named = {pytree.dotted(argument.path): argument for argument in arguments}
    given: dict[tuple[str | int, ...], Any] = {}
    for name, value in files.items():
        if (argument := named.get(name)) is None:
            if not named:  # no such program, or it takes no arguments: the call reports it
                return {(name,): value}
            raise UsageError(
                f"--arg: expected a name of an argument of {program!r}, found {name!r}",
                hint=f"they are: {', '.join(named)}; a dot inside of a key is written %2E",
            )
        dtype = dtype_of(argument.dtype)
        as_bytes = value.dtype.kind == "V" and dtype.itemsize == value.dtype.itemsize
        given[argument.path] = value.view(dtype) if as_bytes else value
    return given
