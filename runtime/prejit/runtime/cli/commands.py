"""All commands by name, and how one is run.

A command stands in the module of its name, in `prejit.runtime.cli` or `prejit.compiler.cli`, and returns the
exit status. Its module is imported when the command runs: `prejit --help` and completion need no other.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click

from prejit.runtime.base.process import importing
from prejit.runtime.errors import UsageError

BUILD_COMMANDS = {
    "plan": "Show programs x targets of a manifest: what is cached, what will compile and why.",
    "build": "Compile manifests and write their bundles.",
    "check-model": "Check that a model of yours keeps the rules of a decoder.",
    "targets": "List the targets that a manifest may name, and which of them this machine builds.",
    "suggest": "Choose the buckets that pad recorded requests least.",
    "diff": "Say what differs between two bundles, and which programs became slower.",
    "schema": "Print the JSON Schema of manifests, for editors.",
    "rebuild": "Build a bundle again from its recorded inputs and compare the two part by part.",
    "record": "Run a program and pack what jax compiles for it into a bundle.",
    "sign": "Sign a bundle, so that trust policies, cosign and model_signing can verify it.",
    "channel": "Say which bundle is the current one, and rotate the keys that say so.",
    "gc": "Remove cached programs and environments that were not used for some days.",
}
"""The commands of the build side, whose dependencies need not be installed."""

COMMANDS = {
    "inspect": "Show what a bundle holds: targets, programs, sizes, versions.",
    "verify": "Check every byte of a bundle; with --run, ask its programs for their golden answers.",
    "fingerprint": "Print the fingerprint of this machine as JSON.",
    "explain": "Compare each target with this machine, axis by axis.",
    "tune": "Compile a bundle on this GPU and record what XLA measures, for builds elsewhere.",
    "generate": "Generate text from a prompt and print it piece by piece.",
    "encode": "Print the embeddings of sentences.",
    "call": "Run a program of a [[program]] section on .npy files.",
    "bench": "Measure a bundle: start-up, latency, tokens a second, memory.",
    "run": "Start any JAX program with a recorded bundle as jax's cache.",
    "serve": "Serve bundles over HTTP: OpenAI's API, the Open Inference Protocol, metrics, a page.",
    "replay": "Run the requests of a log of `prejit serve` again and compare.",
    "observe": "Write dashboards of Grafana, alert rules of Prometheus and runbooks for servers.",
}
"""The commands that use a bundle or serve one."""

_BUILD_PACKAGES = {
    *("prejit", "flax", "huggingface_hub", "orbax", "pydantic", "rich", "safetensors"),
    "transformers",
}
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
        for title, commands in (
            ("Commands that use a bundle", COMMANDS),
            ("Commands that build (pip install 'prejit[compiler]')", BUILD_COMMANDS),
        ):
            with formatter.section(title):
                formatter.write_dl([*commands.items()])


def _imported(name: str) -> click.Command:
    """Import a command. Those of the build side are imported by name: a server must not depend on them."""
    side, attribute = "compiler" if name in BUILD_COMMANDS else "runtime", name.replace("-", "_")
    with importing():
        module = importlib.import_module(f"prejit.{side}.cli.{attribute}")
    command: click.Command = getattr(module, attribute)
    return command


def _versions(_: click.Context) -> str:
    from importlib.metadata import version

    packages = (f"{name} {version(name)}" for name in ("prejit", "jax", "jaxlib"))
    return "\n".join((*packages, f"python {sys.version.partition(' ')[0]}"))


@click.group(
    cls=_Commands,
    commands=[
        click.Command(name, short_help=text) for name, text in (COMMANDS | BUILD_COMMANDS).items()
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
        if (error.name or "").partition(".")[0] not in _BUILD_PACKAGES:
            raise
        raise UsageError(
            f"`prejit {arguments[0]}` needs the build side, and {error.name} is not installed",
            hint="pip install 'prejit[compiler]'",
        ) from error
