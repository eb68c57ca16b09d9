"""`prejit rollout`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from prejit.runtime.base.wording import size, table
from prejit.runtime.cli.command_options import DIR, JSON, VERBOSE, check_one
from prejit.runtime.cli.output import print_json, print_text, progress

if TYPE_CHECKING:
    from prejit.compiler.fleet.channel_rollout import MachineChange, RolloutPlan


@click.command(
    epilog="Examples:\n\n\b\n"
    "  prejit rollout oci://registry.example/demo:prod oci://registry.example/demo:v2 --fleet saved/\n"
    "  prejit rollout oci://registry.example/demo:prod artifacts/demo --dry-run\n"
    "  prejit rollout oci://registry.example/demo:prod --back\n\n"
    "Exit status: 1 where --fleet has a machine that loads a target now and would compile then; nothing "
    "moves then."
)
@click.argument("channel", metavar="CHANNEL", help="The tag that servers follow.")
@click.argument(
    "new",
    metavar="[NEW]",
    required=False,
    help="A reference, a directory, a .tar, or a digest in the channel's repository.",
)
@click.option("--fleet", "directory", **DIR, help="Say what changes for these fingerprints.")
@click.option("--back", is_flag=True, help="Move to the bundle before the last rollout.")
@click.option("--dry-run", is_flag=True, help="Move nothing; only print the plan.")
@click.option("--allow-compile", is_flag=True, help="Move it even where a machine would compile.")
@VERBOSE
@JSON
def rollout(
    channel: str,
    new: str | None,
    directory: str | None,
    back: bool,
    dry_run: bool,
    allow_compile: bool,
    as_json: bool,
) -> int:
    """Move a channel to another bundle, after a look at who is served then and what each machine fetches.

    Its repository gets what it lacks first. CHANNEL-previous leads to the bundle before.
    """
    from prejit.compiler.fleet.channel_rollout import Rollout
    from prejit.runtime.cli.bundle_references import reporting
    from prejit.runtime.machine.fleet_machines import Fleet, read_fleet, unread

    check_one({"NEW": new, "--back": back or None}, required=True)
    fleet = Fleet(()) if directory is None else read_fleet(directory)
    if fleet.unreadable:  # one of them may be the machine that would compile
        raise unread(fleet.unreadable, len(fleet.machines) + len(fleet.unreadable))
    found = Rollout(channel, new or "", fleet.machines)
    plan = found.plan
    is_refused = bool(plan.losing) and not allow_compile
    moves = not (dry_run or is_refused or plan.before == plan.after)
    if not as_json:
        print_text(_plan_text(plan))
    if moves:
        with progress() as show:
            found.move(reporting(show))
    if as_json:
        print_json(plan.described() | {"is_moved": moves})
    else:
        print_text(_outcome(plan, moves, is_refused))
    return int(is_refused)


def _plan_text(plan: RolloutPlan) -> str:
    from prejit.runtime.base.wording import few

    rows = [
        (
            str(len(each.machines)),
            _loads(each.before, each.was_served),
            _loads(each.after, each.is_served),
            size(each.fetched_bytes),
            few(each.machines),
            _why(each),
        )
        for each in plan.changes
    ]
    parts = [
        f"{plan.channel}: {plan.before or 'new'} -> {plan.after}",
        f"its repository lacks {size(plan.copied_bytes)}",
    ]
    if rows:
        parts.append(table(("machines", "now", "then", "each fetches", "which", "why not"), rows))
    return "\n".join(parts)


def _loads(target: str, is_served: bool) -> str:
    return target if is_served else "compiles" if target else "-"


def _why(change: MachineChange) -> str:
    if change.is_served:
        return ""
    return f"closest is {change.after}: {change.why}"


def _outcome(plan: RolloutPlan, is_moved: bool, is_refused: bool) -> str:
    if is_refused:
        return (
            f"not moved: {len(plan.losing)} machines load a target now and would compile; "
            "--allow-compile moves it nevertheless"
        )
    if is_moved and not plan.before:
        return "moved"  # the first rollout of a channel leaves no way back
    if is_moved:
        return f"moved; `prejit rollout {plan.channel} --back` moves it back"
    return "not moved" + (": it leads there already" if plan.before == plan.after else "")
