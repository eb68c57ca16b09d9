"""The commands, their options and their examples."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from prejit.runtime.cli.serve_options import add_serving
from prejit.runtime.generation.options import OPTIONS, Option

BUILD_COMMANDS = {
    "plan": "show programs x targets of a manifest: what is cached, what will compile and why",
    "build": "compile manifests and write their bundles",
    "check-model": "check that a model of yours keeps the rules of a decoder",
    "targets": "list the targets that a manifest may name, and which of them this machine builds",
    "diff": "say what differs between two bundles, and which programs became slower",
    "suggest": "choose the buckets that pad recorded requests least",
    "rebuild": "build a bundle again from its recorded inputs and compare the two part by part",
    "schema": "print the JSON Schema of manifests, for editors",
    "record": "run a program and pack what jax compiles for it into a bundle",
    "sign": "sign a bundle, so that trust policies, cosign and model_signing can verify it",
    "channel": "say which bundle is the current one, and rotate the keys that say so",
    "gc": "remove cached programs and environments that were not used for some days",
}
"""The commands of the build side, which need not be installed."""

COMMANDS = {
    "inspect": "inspect",
    "verify": "inspect",
    "fingerprint": "machine",
    "explain": "machine",
    "tune": "tune",
    "generate": "generate",
    "encode": "encode",
    "call": "call",
    "bench": "bench",
    "run": "run",
    "serve": "serve",
    "replay": "replay",
    "observe": "observe",
}
"""The module of `prejit.runtime.cli` that holds the function of each command."""

_EXAMPLES = {
    "inspect": "prejit inspect artifacts/demo\n  prejit inspect artifacts/demo --json",
    "verify": "prejit verify artifacts/demo\n  prejit verify artifacts/demo --policy trust.toml\n"
    "  prejit verify artifacts/demo --run\n  prejit verify artifacts/demo --forget",
    "fingerprint": "prejit fingerprint > web-3.json",
    "explain": "prejit explain artifacts/demo\n"
    "  prejit explain artifacts/demo --fingerprint web-3.json\n"
    "  prejit explain artifacts/demo --fleet fleet --page fleet.html --on-mismatch error",
    "generate": "prejit generate artifacts/demo --prompt 'def main(' --max-new-tokens 64\n"
    "  prejit generate artifacts/demo --prompt-ids 1,5,9 --temperature 0.8 --top-p 0.9 --seed 7\n"
    "  prejit generate artifacts/demo --prompt 'import' --on-mismatch error --json\n"
    "  prejit generate artifacts/assistant --chat 'Why is the sky blue?'",
    "encode": "prejit encode artifacts/encoder 'a sentence' 'another' --json > embeddings.json",
    "call": "prejit call artifacts/score score --arg x=x.npy -o results",
    "run": "prejit run artifacts/serve -- python serve.py\n"
    "  prejit run artifacts/serve --report -- python serve.py\n"
    "  prejit run artifacts/serve --require-aot -- gunicorn serve:app",
    "serve": "prejit serve artifacts/demo\n"
    "  prejit serve artifacts/assistant search=artifacts/encoder --keys keys.txt --log requests.jsonl\n"
    "  prejit serve artifacts/demo --host 0.0.0.0 --port 8080 --on-mismatch error",
    "replay": "prejit replay requests.jsonl\n"
    "  prejit replay requests.jsonl --bundle demo=artifacts/demo-after",
    "observe": "prejit observe init watch\n"
    "  prejit observe init watch --runbooks https://wiki.example/runbooks --force",
    "tune": "prejit tune artifacts/demo -o h200.json",
    "bench": "prejit bench artifacts/demo --page demo.html\n"
    "  prejit bench artifacts/demo -o baseline.json\n"
    "  prejit bench artifacts/demo --baseline baseline.json --tolerance 15\n"
    "  prejit bench artifacts/demo --against artifacts/demo-before",
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line."""
    reader = parser()
    options = reader.parse_args(arguments)
    if options.command == "generate":
        given = (options.prompt, options.prompt_ids, options.chat, options.source)
        if not any(each is not None for each in given):
            reader.error("generate: one of --prompt, --prompt-ids, --chat and --source is required")
    if options.command == "run" and "--" in arguments:
        # argparse also drops a `--` of the program's own command, which one depends on Python's version.
        options.child = list(arguments[arguments.index("--") + 1 :])
    return options


def parser() -> argparse.ArgumentParser:
    """Return the parser of the commands that read or run a bundle."""
    top = argparse.ArgumentParser(
        prog="prejit",
        description="Compile JAX models ahead of time, package them, and run them without compiling.",
        epilog="build side (pip install 'prejit[compiler]'):\n"
        + "\n".join(f"  {name:<13}{text}" for name, text in BUILD_COMMANDS.items())
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

    add("inspect", "show what a bundle holds: targets, programs, sizes, versions")
    command = add(
        "verify", "check every byte of a bundle; runs nothing without --run, and needs no network"
    )
    command.add_argument(
        "--policy",
        metavar="FILE",
        help="check too that this trust policy lets every target run (exit 5: it does not)",
    )
    command.add_argument(
        "--run",
        action="store_true",
        help="then run every program that this machine would load, and compare what it returns with the "
        "golden answer of its build (exit 3: one is wrong, and in quarantine on this machine)",
    )
    command.add_argument(
        "--forget",
        action="store_true",
        help="then forget what this machine holds against the bundle: first loads that crashed, and "
        "executables in quarantine",
    )
    add("fingerprint", "print the fingerprint of this machine as JSON", bundle=False, json=False)
    command = add(
        "explain", "compare each target with this machine, axis by axis (exit 3: no target fits)"
    )
    which = command.add_mutually_exclusive_group()
    _add_fingerprint(which)
    which.add_argument(
        "--fleet",
        metavar="DIR",
        help="compare with every fingerprint in DIR and below: which target serves which machine, and "
        "the fewest targets to add so that none falls back",
    )
    command.add_argument(
        "--page", metavar="FILE.html", help="with --fleet: write the report as an HTML page"
    )
    command.add_argument(
        "--on-mismatch",
        choices=("jit", "error"),
        default="jit",
        help="with --fleet, error: exit 3 where a machine falls back to compiling (default jit)",
    )

    command = add(
        "tune",
        "compile a bundle on this GPU and record what XLA measures, for builds elsewhere",
        json=False,
    )
    _add_trust(command)
    command.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="file to write; name it as `tuning` of a [[target]]",
    )

    command = add("generate", "generate text from a prompt and print it piece by piece")
    prompt = command.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-ids", metavar="IDS", help="token ids, separated by commas")
    prompt.add_argument(
        "--chat",
        metavar="TEXT",
        help="a user's message; the bundle's chat template makes the prompt",
    )
    for option in OPTIONS.values():
        _add_option(command, option)
    command.add_argument("--stats", action="store_true", help="print statistics on stderr")
    _add_loading(command)

    command = add("encode", "print the embeddings of sentences")
    command.add_argument("text", metavar="TEXT", nargs="+", help="a sentence")
    command.add_argument(
        "--on-too-long",
        choices=("truncate", "error"),
        default="truncate",
        help="for a sentence that is longer than the model takes (default truncate)",
    )
    command.add_argument("--stats", action="store_true", help="print statistics on stderr")
    _add_loading(command)

    command = add("call", "run a program of a [[program]] section on .npy files")
    command.add_argument("program", metavar="PROGRAM", help="name of the program in the manifest")
    command.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="an argument; NAME may be a path such as batch.tokens or layers.0 (a dot in a key is %%2E)",
    )
    command.add_argument(
        "--static",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a static argument; VALUE is JSON, or else text",
    )
    command.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="DIR",
        help="directory for the results, one .npy file each",
    )
    command.add_argument("--stats", action="store_true", help="print statistics on stderr")
    _add_loading(command)

    command = add("bench", "measure a bundle: start-up, latency, tokens a second, memory")
    command.add_argument(
        "--runs",
        type=int,
        default=5,
        metavar="N",
        help="number of fresh processes that measure start-up (default 5)",
    )
    command.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        metavar="S",
        help="time for all measurements in one process (default 20)",
    )
    which = command.add_mutually_exclusive_group()
    which.add_argument(
        "--baseline",
        metavar="FILE.json",
        help="compare with the report that an earlier run wrote with -o",
    )
    which.add_argument(
        "--against",
        metavar="OTHER",
        help="compare with another bundle, measured in alternation",
    )
    command.add_argument(
        "--tolerance",
        type=float,
        default=25.0,
        metavar="PERCENT",
        help="exit 9 where a median is worse by more than this and by more than the spread (default 25)",
    )
    command.add_argument("-o", "--output", metavar="FILE.json", help="write the report as JSON")
    command.add_argument("--page", metavar="FILE.html", help="write the report as an HTML page")
    _add_loading(command)

    command = add(
        "run",
        "start any JAX program with a recorded bundle as jax's cache (exit: its own)",
        json=False,
    )
    _add_trust(command)
    command.add_argument(
        "child",
        metavar="COMMAND",
        nargs="+",
        help="the program's command and its arguments, behind --",
    )
    command.add_argument(
        "--report",
        action="store_true",
        help="print on stderr at the end what was read and what was compiled, and why",
    )
    command.add_argument(
        "--live",
        action="store_true",
        help="print on stderr what is compiled, and why, as soon as it happens",
    )
    command.add_argument("-o", "--output", metavar="FILE.json", help="write the report as JSON")
    command.add_argument(
        "--require-aot",
        action="store_true",
        help="raise an error in the program where it would compile, and exit with status 3",
    )
    command.add_argument(
        "--on-mismatch",
        choices=("jit", "error"),
        default="jit",
        help="where this machine matches no target: run without the bundle, or fail with exit status 3 "
        "(default jit)",
    )
    command = add(
        "serve",
        "serve bundles over HTTP: OpenAI's API, the Open Inference Protocol, metrics, a page",
        bundle=False,
        json=False,
    )
    _add_trust(command)
    add_serving(command)

    command = add(
        "replay",
        "run the requests of a log of `prejit serve` again and compare (exit 1: one differs)",
        bundle=False,
    )
    _add_trust(command)
    command.add_argument("log", metavar="LOG", help="file that `prejit serve --log` wrote")
    command.add_argument(
        "--bundle",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="a bundle in place of the one with this name in the log; may be repeated",
    )

    command = add(
        "observe",
        "write dashboards of Grafana, alert rules of Prometheus and runbooks for servers",
        bundle=False,
        json=False,
    )
    command.add_argument("action", choices=("init",), help="init writes the files")
    command.add_argument("directory", metavar="DIR", help="directory for the files")
    command.add_argument(
        "--runbooks",
        default="runbooks",
        metavar="URL",
        help="where people on call find the runbooks; alerts link there (default: runbooks, in DIR)",
    )
    command.add_argument(
        "--force", action="store_true", help="overwrite files that have other content"
    )
    return top


_METAVARS = {int: "N", float: "X", list: "TEXT", str: "TEXT"}
"""What the help shows for the value of a generation option, by its type."""


def _add_option(command: argparse.ArgumentParser, option: Option) -> None:
    """Add the flag of a generation option, if it has one. The value None means that it is not given."""
    flag = f"--{option.name.replace('_', '-')}"
    text = option.help.replace("%", "%%")
    if option.flag is None:
        return
    if option.flag is bool:
        command.add_argument(flag, action="store_true", help=text)
        return
    if option.default not in (None, ()):
        own = ", unless the bundle has its own" if option.published else ""
        text = f"{text} (default {option.default:g}{own})"
    kind: dict[str, Any] = {"action": "append"} if option.flag is list else {"type": option.flag}
    command.add_argument(flag, metavar=_METAVARS[option.flag], help=text, **kind)


def _add_fingerprint(command: argparse._ActionsContainer) -> None:
    command.add_argument(
        "--fingerprint",
        metavar="FILE",
        help="use the fingerprint in FILE instead of this machine's own",
    )


def _add_trust(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trust",
        metavar="FILE",
        help="a trust policy that must let the bundle run; those of $PREJIT_TRUST and the machine apply too",
    )


def _add_loading(command: argparse.ArgumentParser) -> None:
    """Add the options of commands that load a bundle; `prejit.runtime.load` has the same."""
    _add_fingerprint(command)
    _add_trust(command)
    command.add_argument(
        "--on-mismatch",
        choices=("jit", "error"),
        default="jit",
        help="where this machine matches no target: compile here, or fail with exit status 3 (default jit)",
    )
