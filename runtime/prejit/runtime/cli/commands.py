"""All commands by name, and how one is run.

The command `NAME` stands in `NAME_command`, or where `FILES` says, in the room `cli` of its package, and
returns the exit status. That module is imported by name when the command runs: `prejit --help` and completion
need no other.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import click

from prejit.runtime.base.process_facts import importing
from prejit.runtime.errors import UsageError


class House(NamedTuple):
    """The commands of a wheel.

    Attributes:
        title: what they are for.
        commands: by name, each with a line for `prejit --help`.
        extra: the extra of `prejit` that installs the wheel; empty: it is the runtime's own.
        packages: what the extra brings, whose absence means that it is not installed.
    """

    title: str
    commands: Mapping[str, str]
    extra: str = ""
    packages: frozenset[str] = frozenset()


HOUSES = {
    "runtime": House(
        "Commands that use a bundle",
        {
            "inspect": "Show what a bundle holds: targets, programs, sizes, versions.",
            "verify": "Check every byte of a bundle; with --run, ask its programs for their golden answers.",
            "fingerprint": "Print the fingerprint of this machine as JSON.",
            "explain": "Compare each target with this machine, axis by axis.",
            "tune": "Compile a bundle on this GPU and record what XLA measures, for builds elsewhere.",
            "generate": "Generate text from a prompt and print it piece by piece.",
            "encode": "Print the embeddings of sentences.",
            "call": "Run a program of a [[program]] section on .npy files.",
            "run": "Start any JAX program with a recorded bundle as jax's cache.",
            "push": "Push a bundle to a registry, a bucket, a directory or a .tar.",
            "pull": "Fetch a bundle into this machine's store, or into a directory.",
            "copy": "Copy a bundle from one place to another.",
            "ls": "List the tags of a repository.",
            "tag": "Let another tag lead to a bundle.",
            "rm": "Remove a tag.",
            "store": "List the bundles of this machine's store, keep some of them, or make room.",
        },
    ),
    "server": House(
        "Commands that serve bundles",
        {
            "serve": "Serve bundles over HTTP: OpenAI's API, the Open Inference Protocol, metrics, a page.",
            "profile": "Record where the time of a bundle or a server goes: steps, programs, kernels.",
            "replay": "Run the requests of a log of `prejit serve` again and compare.",
            "load": "Measure how much load a server bears: its curve, knee and highest rate within limits.",
            "gate": "Judge whether a bundle may take the place of another one: tokens, times, memory, fleet.",
            "observe": "Write dashboards of Grafana, alert rules of Prometheus and runbooks for servers.",
        },
        "server",
        frozenset(
            {
                *("prejit", "httptools", "llguidance", "msgspec", "prometheus_client"),
                *("starlette", "uvicorn"),
            }
        ),
    ),
    "compiler": House(
        "Commands that build and compare",
        {
            "plan": "Show programs x targets of a manifest: what is cached, what will compile and why.",
            "build": "Compile manifests and write their bundles.",
            "check-model": "Check that a model of yours keeps the rules of a decoder.",
            "targets": "List the targets that a manifest may name, and which of them this machine builds.",
            "bench": "Measure a bundle: start-up, latency, tokens a second, memory.",
            "fleet": "Say which target each machine of a fleet loads, and which targets are missing.",
            "suggest": "Choose the buckets that pad recorded requests least.",
            "diff": "Say what differs between two bundles, and which programs became slower.",
            "schema": "Print the JSON Schema of manifests, for editors.",
            "rebuild": "Build a bundle again from its recorded inputs and compare the two part by part.",
            "record": "Run a program and pack what jax compiles for it into a bundle.",
            "sign": "Sign a bundle, so that trust policies, cosign and model_signing can verify it.",
            "wheel": "Write a wheel with a bundle in it, for pip.",
            "channel": "Say which bundle is the current one, and rotate the keys that say so.",
            "rollout": "Move a channel to another bundle, after a look at what each machine would do.",
            "gc": "Remove cached programs and environments that were not used for some days.",
        },
        "compiler",
        frozenset(
            {
                *("prejit", "flax", "google", "huggingface_hub", "orbax", "pydantic", "rich"),
                *("safetensors", "transformers"),
            }
        ),
    ),
}
"""The wheels of prejit by the name of their package. Only the runtime's needs to be installed."""

HOMES = {name: package for package, house in HOUSES.items() for name in house.commands}
"""The package of each command."""
FILES = {
    **dict.fromkeys(("push", "pull", "copy", "ls", "tag", "rm", "store"), "ship_commands"),
    **dict.fromkeys(("explain", "fingerprint", "tune"), "machine_commands"),
    **dict.fromkeys(("generate", "encode"), "model_commands"),
    **dict.fromkeys(("gate", "replay"), "release_commands"),
    **dict.fromkeys(("plan", "build", "rebuild"), "build_commands"),
    **dict.fromkeys(("check-model", "targets", "suggest", "schema"), "manifest_commands"),
    **dict.fromkeys(("bench", "fleet", "diff", "wheel", "rollout"), "bundle_commands"),
    **dict.fromkeys(("sign", "channel"), "signing_commands"),
}
"""The modules that hold several commands."""

_COMPLETE = "_PREJIT_COMPLETE"


class _Commands(click.Group):
    """Commands by name, each without its options until it is resolved."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else _imported(name), rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for house in HOUSES.values():
            install = house.extra and f" (pip install 'prejit[{house.extra}]')"
            with formatter.section(f"{house.title}{install}"):
                formatter.write_dl([*house.commands.items()])


def _imported(name: str) -> click.Command:
    attribute = name.replace("-", "_")
    with importing():
        file = FILES.get(name, f"{attribute}_command")
        module = importlib.import_module(f"prejit.{HOMES[name]}.cli.{file}")
    command: click.Command = getattr(module, attribute)
    return command


def _versions(_: click.Context) -> str:
    from importlib.metadata import version

    packages = (f"{name} {version(name)}" for name in ("prejit", "jax", "jaxlib"))
    return "\n".join((*packages, f"python {sys.version.partition(' ')[0]}"))


@click.group(
    cls=_Commands,
    commands=[
        click.Command(name, short_help=text)
        for house in HOUSES.values()
        for name, text in house.commands.items()
    ],
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "show_default": True,
    },
    epilog="`prejit COMMAND --help` gives options and examples.",
)
@click.custom_version_option(
    _versions, help="Print the versions of prejit, jax, jaxlib and Python."
)
def commands() -> None:
    """Compile JAX models ahead of time, package them, and run them without compiling."""


def run(arguments: Sequence[str]) -> int:
    """Run a command, or complete one for a shell. The caller prints errors, and handles a closed stdout.

    Returns:
        The exit status.

    Raises:
        PrejitError: as the command; UsageError where the command line has a mistake.
    """
    if instruction := os.environ.get(_COMPLETE):
        from click.shell_completion import shell_complete

        return shell_complete(commands, {}, "prejit", _COMPLETE, instruction)
    try:
        # Not `commands.main`, which turns a closed stdout into exit status 1.
        with commands.make_context("prejit", [*arguments]) as context:
            return commands.invoke(context) or 0
    except click.exceptions.Exit as done:  # --help
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        at = error.ctx or click.Context(commands, info_name="prejit")
        form = f"{at.command_path} {' '.join(at.command.collect_usage_pieces(at))}"
        hint = f"expected {form}; `{at.command_path} --help` says more"
        raise UsageError(error.format_message(), hint=hint) from error
    except ValueError as error:  # at the import of jax, which reads its settings
        message = str(error).lower()
        refused = [
            each for each in os.environ if each.startswith("JAX_") and each.lower() in message
        ]
        if not refused:
            raise
        raise UsageError(
            f"{refused[0]}: expected a value that jax takes, found {os.environ[refused[0]]!r:.80}: {error}",
            hint="correct this environment variable, or unset it",
        ) from error
    except ModuleNotFoundError as error:  # at the import, or later in a command
        # `inspect` can use another house's parts.
        home = re.match(r"prejit\.(\w+)", error.name or "")
        house = HOUSES.get(home[1] if home else HOMES.get(arguments[0], ""))
        if house is None or (error.name or "").partition(".")[0] not in house.packages:
            raise
        raise UsageError(
            f"`prejit {arguments[0]}` needs prejit's {house.extra}, and {error.name} is not installed",
            hint=f"pip install 'prejit[{house.extra}]'",
        ) from error
