"""The command line: `prejit`, or `python -m prejit.runtime` where only the server side is installed.

What reads or runs a bundle is here and in commands.py. What builds one belongs to the build side, which
need not be installed.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from prejit.runtime.errors import PrejitError, StoreError, UsageError

BUILD_COMMANDS = {
    "plan": "show what a manifest asks for: what is cached, what will compile and why",
    "build": "compile manifests and write their bundles",
    "targets": "list the targets that a manifest may name, and which of them this machine builds",
    "schema": "print the JSON Schema of manifests, for editors",
    "gc": "remove cached programs and environments that were not used for some days",
}

_BUILD_PACKAGES = {
    *("prejit", "click", "flax", "huggingface_hub", "orbax", "pydantic", "rich", "safetensors"),
    "transformers",
}
_EXAMPLES = {
    "inspect": "prejit inspect artifacts/demo\n  prejit inspect artifacts/demo --json",
    "verify": "prejit verify artifacts/demo",
    "fingerprint": "prejit fingerprint > web-3.json",
    "explain": "prejit explain artifacts/demo\n"
    "  prejit explain artifacts/demo --fingerprint web-3.json\n"
    "  prejit explain artifacts/demo --fleet fleet --page fleet.html --require-aot",
    "generate": "prejit generate artifacts/demo --prompt 'def main(' --max-new-tokens 64\n"
    "  prejit generate artifacts/demo --prompt-ids 1,5,9 --temperature 0.8 --top-p 0.9 --seed 7\n"
    "  prejit generate artifacts/demo --prompt 'import' --require-aot --json\n"
    "  prejit generate artifacts/assistant --chat 'Why is the sky blue?'",
    "encode": "prejit encode artifacts/encoder 'a sentence' 'another' --json > embeddings.json",
    "call": "prejit call artifacts/score score --arg x=x.npy -o results",
    "tune": "prejit tune artifacts/demo -o h200.json",
    "bench": "prejit bench artifacts/demo --page demo.html\n"
    "  prejit bench artifacts/demo -o baseline.json\n"
    "  prejit bench artifacts/demo --baseline baseline.json --tolerance 15\n"
    "  prejit bench artifacts/demo --against artifacts/demo-before",
}


def parser() -> argparse.ArgumentParser:
    """The parser of all commands that the server side has."""
    top = argparse.ArgumentParser(
        prog="prejit",
        description="Compile JAX models ahead of time, package them, and run them without compiling.",
        epilog="build side (pip install 'prejit[compiler]'):\n"
        + "\n".join(f"  {name:<12}{text}" for name, text in BUILD_COMMANDS.items())
        + "\n\n`prejit COMMAND --help` gives options and examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(
        name: str, text: str, *, bundle: bool = True, json: bool = True
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"examples:\n  {_EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if bundle:
            command.add_argument("bundle", metavar="BUNDLE", help="directory of a bundle")
        if json:
            command.add_argument("--json", action="store_true", help="print JSON on stdout")
        return command

    def add_machine(command: argparse._ActionsContainer) -> None:
        command.add_argument(
            "--fingerprint",
            metavar="FILE",
            help="take this machine for the one that FILE was saved on",
        )

    def add_running(command: argparse.ArgumentParser) -> None:
        add_machine(command)
        command.add_argument(
            "--require-aot",
            action="store_true",
            help="fail (exit 3) rather than compile where this machine is none of the targets; "
            "on_mismatch='error' of prejit.runtime.load",
        )

    add("inspect", "show what a bundle holds: targets, programs, sizes, versions")
    add("verify", "check every byte of a bundle; runs nothing and needs no network")
    add("fingerprint", "print what this machine is, as JSON", bundle=False, json=False)
    command = add(
        "explain", "compare each target with this machine, axis by axis (exit 3: none fits)"
    )
    which = command.add_mutually_exclusive_group()
    add_machine(which)
    which.add_argument(
        "--fleet",
        metavar="DIR",
        help="compare with every fingerprint in DIR and below: which target serves which machine, and "
        "the fewest to add so that none falls back",
    )
    command.add_argument(
        "--page", metavar="FILE.html", help="with --fleet: write a page that shows all of it"
    )
    command.add_argument(
        "--require-aot", action="store_true", help="with --fleet: exit 3 where a machine falls back"
    )

    command = add(
        "tune", "compile a bundle on this GPU and record what XLA measures, for builds", json=False
    )
    command.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="name it as `tuning` of a [[target]]"
    )

    command = add("generate", "generate text from a prompt, as it comes")
    prompt = command.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to go on from")
    prompt.add_argument("--prompt-ids", metavar="IDS", help="token ids, separated by commas")
    prompt.add_argument(
        "--chat", metavar="TEXT", help="a user's message, put into the model's chat template"
    )
    command.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="stop after N tokens (default: the bundle's limit)",
    )
    command.add_argument(
        "--stop", action="append", metavar="TEXT", help="stop before this text; may be repeated"
    )
    for name, kind, text in (
        ("temperature", float, "0: the most likely token (default, unless the bundle has its own)"),
        ("top-k", int, "0: all tokens (default, unless the bundle has its own)"),
        ("top-p", float, "1: all (default, unless the bundle has its own)"),
        ("min-p", float, "0: all (default, unless the bundle has its own)"),
        ("repetition-penalty", float, "1: none (default, unless the bundle has its own)"),
        ("presence-penalty", float, "0: none (default)"),
        ("frequency-penalty", float, "0: none (default)"),
        ("seed", int, "of the sampling (default 0)"),
        (
            "logprobs",
            int,
            "with --json: each token's log-probability, and those of the L most likely ones, 0 to 20",
        ),
    ):
        command.add_argument(f"--{name}", type=kind, metavar=name[0].upper(), help=text)
    command.add_argument(
        "--prompt-lookup",
        action="store_true",
        help="draft tokens from the text so far; the same tokens, faster where it repeats itself",
    )
    command.add_argument("--stats", action="store_true", help="say on stderr what it cost")
    add_running(command)

    command = add("encode", "print the embeddings of sentences")
    command.add_argument("text", metavar="TEXT", nargs="+", help="a sentence")
    command.add_argument(
        "--on-too-long",
        choices=("truncate", "error"),
        default="truncate",
        help="what becomes of a sentence that is longer than the model takes (default truncate)",
    )
    command.add_argument("--stats", action="store_true", help="say on stderr what it cost")
    add_running(command)

    command = add("call", "run a program of a [[program]] section on .npy files")
    command.add_argument("program", metavar="PROGRAM", help="its name in the manifest")
    command.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="an argument; NAME may be a path such as batch.tokens or layers.0 (a dot in a key is %%2E)",
    )
    command.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="where the results go, one .npy each"
    )
    add_running(command)

    command = add("bench", "measure a bundle: start-up, latency, tokens a second, memory")
    command.add_argument(
        "--runs", type=int, default=5, metavar="N", help="fresh processes for start-up (default 5)"
    )
    command.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="for all that is measured in one process; more give more samples (default 20)",
    )
    which = command.add_mutually_exclusive_group()
    which.add_argument(
        "--baseline", metavar="FILE.json", help="compare with what an earlier run wrote with -o"
    )
    which.add_argument(
        "--against",
        metavar="OTHER",
        help="compare with another bundle, measured in turns with this",
    )
    command.add_argument(
        "--tolerance",
        type=float,
        default=25.0,
        metavar="PERCENT",
        help="exit 9 where a median is worse by more than this, and than the spread (default 25)",
    )
    command.add_argument(
        "-o", "--output", metavar="FILE.json", help="write the JSON to a file, to keep"
    )
    command.add_argument("--page", metavar="FILE.html", help="write a page that shows all of it")
    add_running(command)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns:
        The exit status: 0 ok, 1 build failed, 2 usage, 3 fingerprint mismatch, 4 integrity,
        6 store, 7 network, 9 regression (`bench`).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal need not know every letter
    try:
        if arguments and arguments[0] in BUILD_COMMANDS:
            return _build_side(arguments)
        options = parser().parse_args(arguments)
        from prejit.runtime.cli import commands

        status: int = getattr(commands, options.command)(options)
        if sys.stdout is not None:  # a daemon may have closed it
            sys.stdout.flush()
        return status
    except PrejitError as error:
        print(error.describe(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _give_up_stdout()  # whoever read our output has gone
        return 141
    except OSError as error:  # a full disk behind stdout
        _give_up_stdout()
        found = StoreError(f"{error.filename or 'standard output'}: {error.strerror}")
        print(found.describe(), file=sys.stderr)
        return found.exit_code


def _give_up_stdout() -> None:
    # Or Python complains again when it closes it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _build_side(arguments: Sequence[str]) -> int:
    # By name, not by an import statement: the server side does not depend on the build side.
    try:
        return int(importlib.import_module("prejit.compiler.cli").run(arguments))
    except ModuleNotFoundError as error:  # at once, or when a command comes to need it
        if (error.name or "").partition(".")[0] not in _BUILD_PACKAGES:
            raise
        raise UsageError(
            f"`prejit {arguments[0]}` needs the build side, and {error.name} is not installed",
            hint="pip install 'prejit[compiler]'",
        ) from error


if __name__ == "__main__":
    sys.exit(main())
