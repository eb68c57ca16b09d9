"""Arguments and options that several commands have: the bundle, and types of values."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from prejit.runtime.base.files import store_errors
from prejit.runtime.base.process_facts import TRUST_VARIABLE, policy_paths
from prejit.runtime.cli.output import print_text, progress, warnings_on_stderr
from prejit.runtime.errors import UsageError
from prejit.runtime.format.layout import Layout, LayoutFiles
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship.reference import is_reference, parse_reference

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.runtime.ship.shipping import Report, TransferProgress


def local_bundle(path: str, *, every: bool) -> str:
    """Return the directory of a bundle. One elsewhere is fetched into this machine's store, with progress.

    Args:
        path: a directory, which is returned as it is, or a reference.
        every: whether all targets are fetched, or that of this machine.
    """
    if not is_reference(path):
        return path
    reference = parse_reference(path)
    if not reference.is_remote:  # of an installed wheel
        return reference.place
    from prejit.runtime.ship.machine_store import machine_store
    from prejit.runtime.ship.pulling import Wanted, pull

    with progress() as show:
        store, arrivals = machine_store(), reporting(show)
        wanted = Wanted(None if every else Fingerprint.current())
        return str(pull(reference, store, wanted, policy_paths(), arrivals).path)


@contextlib.contextmanager
def bundle_files(path: str) -> Iterator[LayoutFiles]:
    """Give the small files of a bundle. Of one elsewhere no others are fetched, and none is kept."""
    if is_reference(path):
        from prejit.runtime.ship.shipping import open_repository

        reference = parse_reference(path)
        yield open_repository(reference).open(reference.tag, reference.digest)
    else:
        with Layout(path) as layout:
            yield layout


def of_this_machine(_: click.Context, __: click.Parameter, path: str) -> str:
    """Return the directory of the bundle that an argument names, with the target of this machine."""
    return local_bundle(path, every=False)


def with_all_targets(_: click.Context, __: click.Parameter, path: str) -> str:
    """Return the directory of the bundle that an argument names, with all its targets."""
    return local_bundle(path, every=True)


def reporting(show: Callable[[str], None]) -> Report:
    """Return a function that shows how far a transfer is, with its rate and the time that is left."""
    began = time.monotonic()
    shown = began + 0.9  # what takes less than a second shows nothing

    def report(at: TransferProgress) -> None:
        nonlocal shown
        now = time.monotonic()
        if at.moved == at.missing:
            show("")
        if now - shown < 0.1 or not 0 < at.moved < at.missing:
            return
        shown = now
        rate = at.moved / max(now - began, 1e-3)
        left = (at.missing - at.moved) / max(rate, 1.0)
        show(
            f"{at.moved / 1e6:,.1f} of {at.missing / 1e6:,.1f} MB, {rate / 1e6:,.1f} MB/s, "
            f"{left:.0f} s left"
        )

    return report


def load_bundle(path: str, on_mismatch: Literal["jit", "error"], fingerprint: str | None) -> Bundle:
    """Load a bundle for this machine, or for the one whose fingerprint is in a file.

    Raises:
        MismatchError, RejectError, StoreError, UsageError: see `prejit.runtime.load`.
    """
    from prejit.runtime.loader import load

    with warnings_on_stderr():
        machine = None if fingerprint is None else Fingerprint.read(fingerprint)
        with progress() as show:
            return load(
                path, on_mismatch=on_mismatch, fingerprint=machine, on_transfer=reporting(show)
            )


_F = TypeVar("_F", bound=Callable[..., Any])


class Number(click.FloatRange):
    """A number of a range. NaN, which compares with no bound, is none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or fail."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"expected a number, found {value!r:.40}", param, ctx)
        return number


def byte_count(text: str) -> int:
    """Return a number of bytes: `1000`, `512M`, `10GB`, `1.5TiB`. As in dd(1), only GB is a power of 1000."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([kKMGT]?)(i?B)?", text)
    if found is None or (found[3] == "iB" and not found[2]):
        raise click.BadParameter(
            f"expected a number of bytes or a size such as 512M, 10GB or 1.5TiB, found {text!r:.40}"
        )
    base = 1000 if found[3] == "B" else 1024
    return int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))


PATH = click.Path(readable=False)  # what opens a file says why it cannot, in the words of its kind
Attributes = dict[str, Any]
"""The type of an option's value, and how the help writes it."""
FILE: Attributes = {"type": PATH, "metavar": "FILE"}
DIR: Attributes = {"type": PATH, "metavar": "DIR"}
COUNT: Attributes = {"type": click.IntRange(min=1), "metavar": "N"}
SECONDS: Attributes = {"type": Number(0, 1e9), "metavar": "SECONDS"}
SIZE: Attributes = {"type": byte_count, "metavar": "SIZE"}

_BUNDLE: Attributes = {
    "type": PATH,
    "metavar": "BUNDLE",
    "help": "A directory, or a reference: oci://, s3://, gs://, az://, hf://, https://, wheel:NAME.",
}
BUNDLE = click.argument("path", **_BUNDLE)
LOCAL_BUNDLE = click.argument("path", **_BUNDLE, callback=of_this_machine)
"""A bundle whose files the command reads: one elsewhere is fetched, with the target of this machine."""
WHOLE_BUNDLE = click.argument("path", **_BUNDLE, callback=with_all_targets)
"""The same, with all its targets."""
COMMAND = click.argument(
    "command",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="-- COMMAND...",
    help="The program's command and its arguments.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
CHECK_FINITE = click.option(
    "--check-finite",
    is_flag=True,
    help="Look at what every program returns, and name the first one with a NaN or an infinity.",
)
STATS = click.option("--stats", is_flag=True, help="Print statistics on stderr.")
FINGERPRINT = click.option(
    "--fingerprint", **FILE, help="Use the fingerprint in FILE instead of this machine's own."
)


def _apply_trust(_: click.Context, __: click.Parameter, policy: str | None) -> None:
    """Make a policy apply to this process and to those that it starts."""
    if policy is not None:
        others = os.environ.get(TRUST_VARIABLE)
        path = os.path.abspath(policy)
        os.environ[TRUST_VARIABLE] = f"{others}{os.pathsep}{path}" if others else path


def _apply_verbose(context: click.Context, _: click.Parameter, count: int) -> None:
    """Print what prejit logs while the command runs: at INFO, or also at DEBUG."""
    if count == 0:
        return
    import logging  # a command that prints no log need not import it

    class Stderr(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with contextlib.suppress(OSError, ValueError):  # its reader has gone, or it is closed
                print_text(self.format(record), file=sys.stderr)

    handler, logger = Stderr(), logging.getLogger("prejit")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    context.call_on_close(partial(logger.setLevel, logger.level))
    context.call_on_close(partial(logger.removeHandler, handler))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if count == 1 else logging.DEBUG)


VERBOSE = click.option(
    "-v",
    "--verbose",
    count=True,
    is_eager=True,
    expose_value=False,
    callback=_apply_verbose,
    help="Say on stderr what is decided and why; -vv: each step too.",
)
TRUST = click.option(
    "--trust",
    **FILE,
    expose_value=False,
    is_eager=True,  # before a bundle is fetched
    callback=_apply_trust,
    help="A trust policy that must let the bundle run; those of $PREJIT_TRUST and the machine apply too.",
)


def on_mismatch_option(text: str) -> Callable[[_F], _F]:
    """Return the option that says what happens where a machine matches no target."""
    return click.option(
        "--on-mismatch", type=click.Choice(("jit", "error")), default="jit", help=text
    )


def loads(command: _F) -> _F:
    """Add the options of commands that load a bundle; `prejit.runtime.load` has the same."""
    mismatch = on_mismatch_option(
        "Where this machine matches no target: compile here, or fail with exit status 3."
    )
    return FINGERPRINT(TRUST(mismatch(VERBOSE(command))))


def _check_place(_: click.Context, __: click.Parameter, path: str | None) -> str | None:
    """Raise StoreError before the work of a command if the file of its result cannot be written."""
    if path is not None:
        import tempfile  # the commands that answer quickly write no file

        with store_errors(path, "write"):
            if not os.path.exists(path):
                tempfile.TemporaryFile(dir=os.path.dirname(path) or ".").close()
            elif os.path.isfile(path) or os.path.isdir(path):  # opening a pipe would wait
                open(path, "ab").close()
    return path


def writes(*names: str, metavar: str, **more: Any) -> Callable[[_F], _F]:
    """Return an option that names a file which the command writes at its end."""
    return click.option(*names, type=PATH, metavar=metavar, callback=_check_place, **more)


def output(metavar: str, text: str, **more: Any) -> Callable[[_F], _F]:
    """Return the option that names the file of the result."""
    return writes("-o", "--output", metavar=metavar, help=text, **more)


def page(text: str) -> Callable[[_F], _F]:
    """Return the option that writes a report as an HTML page."""
    return writes("--page", metavar="FILE.html", help=text)


def check_one(
    options: Mapping[str, object], *, required: bool = False, hint: str | None = None
) -> None:
    """Check that no two of some options are given. The value None means that an option is not.

    Raises:
        UsageError: several are given, or none where one is required.
    """
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1 or (required and not given):
        found = " and ".join(given) or "none"
        raise UsageError(f"expected one of {', '.join(options)}, found {found}", hint=hint)
