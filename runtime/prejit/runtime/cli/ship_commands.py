"""Commands that move bundles between this machine, registries, buckets and servers. None imports jax."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import click

from prejit.runtime.base.process_facts import policy_paths
from prejit.runtime.base.wording import table
from prejit.runtime.cli.command_options import (
    JSON,
    PATH,
    SIZE,
    TRUST,
    VERBOSE,
    Number,
    check_one,
    reporting,
)
from prejit.runtime.cli.output import print_json, print_text, progress
from prejit.runtime.errors import UsageError
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship.machine_store import machine_store
from prejit.runtime.ship.mounted_forms import IMAGE, MODELPACK
from prejit.runtime.ship.pulling import Wanted, pull_into
from prejit.runtime.ship.pulling import pull as fetch
from prejit.runtime.ship.reference import Reference, parse_reference
from prejit.runtime.ship.shipping import Moved, open_repository, ship

_LIKE_REGISTRY = re.compile(r"(localhost|[\w.-]+:\d+|[\w.-]+\.[a-z]{2,})/")
"""The beginning of a reference as docker has it: `ghcr.io/` or `localhost:5000/`."""
_TARGETS = click.option(
    "--target", "targets", multiple=True, metavar="NAME", help="Move this target only; repeatable."
)
_REFERENCE = click.argument(
    "reference", metavar="REFERENCE", help="Such as oci://HOST/REPOSITORY:TAG."
)


def _say(moved: Moved, where: Reference, seconds: float, as_json: bool) -> int:
    if as_json:
        print_json(asdict(moved) | {"reference": str(where), "seconds": round(seconds, 3)})
        return 0
    rate = moved.moved_bytes / max(seconds, 1e-3) / 1e6
    mounted = f", {moved.mounted_bytes / 1e6:,.1f} MB were mounted" if moved.mounted_bytes else ""
    print_text(
        f"{where.at(moved.digest)}\n{moved.blobs} files, {moved.moved_bytes / 1e6:,.1f} MB in "
        f"{seconds:.1f} s ({rate:,.0f} MB/s); {moved.present_bytes / 1e6:,.1f} MB were there{mounted}"
    )
    return 0


def _reference(text: str) -> Reference:
    """Return where a bundle is. As `parse_reference`, but a registry without `oci://` is an error."""
    if _LIKE_REGISTRY.match(text) and not os.path.lexists(text.partition("/")[0]):
        raise UsageError(
            f"{text}: expected a URL or a path, found what looks like a registry",
            hint=f"give oci://{text}, or ./{text} for a directory",
        )
    return parse_reference(text)


def _ship(
    source: Reference, target: Reference, targets: Sequence[str], as_json: bool, form: str = ""
) -> int:
    began = time.monotonic()
    with progress() as show:
        moved = ship(source, target, targets, reporting(show), form=form)
    return _say(moved, target, time.monotonic() - began, as_json)


@click.command(
    epilog="Examples:\n\n\b\n  prejit push artifacts/demo oci://registry.example/models/demo:v1\n"
    "  prejit push artifacts/demo s3://bucket/models/demo:v1\n  prejit push artifacts/demo demo.tar\n"
    "  prejit push artifacts/demo oci://registry.example/models/demo:v1-image --image"
)
@click.argument("path", type=PATH, metavar="BUNDLE", help="Directory or .tar of a bundle.")
@_REFERENCE
@_TARGETS
@click.option(
    "--image",
    flag_value=IMAGE,
    help="Push an OCI image with the bundle in /models, which containerd, Docker and KServe mount.",
)
@click.option(
    "--modelpack",
    flag_value=MODELPACK,
    help="Push an artifact of titled files, as CNCF ModelPack has it, which CRI-O and podman mount.",
)
@VERBOSE
@JSON
def push(
    path: str,
    reference: str,
    targets: tuple[str, ...],
    image: str | None,
    modelpack: str | None,
    as_json: bool,
) -> int:
    """Push a bundle with all that is attached to it: only what the other side lacks."""
    check_one({"--image": image, "--modelpack": modelpack})
    source = _reference(path)
    if source.is_remote:
        raise UsageError(
            f"{path}: expected a bundle on this machine, found a URL",
            hint=f"copy it: prejit copy {path} {reference}",
        )
    return _ship(source, _reference(reference), targets, as_json, image or modelpack or "")


@click.command(
    epilog="Examples:\n\n\b\n  prejit copy oci://staging.example/demo:v1 oci://registry.example/demo:v1\n"
    "  prejit copy demo.tar oci://registry.example/demo:v1"
)
@click.argument("source", metavar="FROM", help="A reference, a directory or a .tar.")
@click.argument("target", metavar="TO", help="A reference, a directory or a .tar.")
@_TARGETS
@VERBOSE
@JSON
def copy(source: str, target: str, targets: tuple[str, ...], as_json: bool) -> int:
    """Copy a bundle from one place to another."""
    return _ship(_reference(source), _reference(target), targets, as_json)


@click.command(
    epilog="Examples:\n\n\b\n  prejit pull oci://registry.example/models/demo:v1\n"
    "  prejit pull s3://bucket/models/demo:v1 -o /srv/models/demo --all"
)
@_REFERENCE
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="DIR",
    help="Write a directory or a .tar instead of this machine's store.",
)
@_TARGETS
@click.option("--all", "every", is_flag=True, help="Fetch all targets, not only this machine's.")
@TRUST
@VERBOSE
@JSON
def pull(
    reference: str, output: str | None, targets: tuple[str, ...], every: bool, as_json: bool
) -> int:
    """Fetch a bundle into this machine's store, and print its directory.

    The trust policies decide before the weights are fetched.
    """
    source = _reference(reference)
    if not source.is_remote:
        raise UsageError(
            f"{reference}: expected a URL, found a path",
            hint=f"copy it: prejit copy {reference} {output or 'DIRECTORY'}",
        )
    machine = None if every or targets else Fingerprint.current()
    began = time.monotonic()
    wanted = Wanted(machine, targets)
    with progress() as show:
        if output is not None:
            into = parse_reference(output)
            if into.is_remote:
                raise UsageError(
                    f"{output}: expected a directory or a .tar, found a URL",
                    hint=f"copy it: prejit copy {reference} {output}",
                )
            moved = pull_into(source, into, wanted, policy_paths(), reporting(show))
        else:
            found = fetch(source, machine_store(), wanted, policy_paths(), reporting(show))
            moved = found.moved or Moved(found.digest, 0, 0, 0)
    if not as_json:
        print_text(output or str(found.path))
    return _say(moved, source, time.monotonic() - began, as_json)


@click.command(
    epilog="Examples:\n\n\b\n  prejit ls oci://registry.example/models/demo\n  prejit ls s3://bucket/models/demo"
)
@_REFERENCE
@JSON
def ls(reference: str, as_json: bool) -> int:
    """List the tags of a repository, and the bundle that each leads to."""
    tags = open_repository(_reference(reference)).tags()
    if as_json:
        print_json([asdict(each) for each in tags])
    else:
        print_text(table(("tag", "digest"), [(each.tag or "-", each.digest) for each in tags]))
    return 0


@click.command(epilog="Examples:\n\n\b\n  prejit tag oci://registry.example/models/demo:v1 stable")
@_REFERENCE
@click.argument("tag", metavar="TAG", help="The other tag.")
@JSON
def tag(reference: str, tag: str, as_json: bool) -> int:
    """Let another tag of the same repository lead to a bundle. No weights move."""
    source = _remote(reference)
    target = parse_reference(f"{replace(source, tag='', digest='')}:{tag}")
    return _ship(source, target, (), as_json)


@click.command(epilog="Examples:\n\n\b\n  prejit rm oci://registry.example/models/demo:v1")
@_REFERENCE
def rm(reference: str) -> int:
    """Remove a tag. A registry collects the blobs that no tag needs; a bucket keeps them."""
    source = _remote(reference)
    left = open_repository(source).remove(source.digest or source.tag)
    print_text(f"removed {source}")
    if left:
        print_text(
            f"no tag leads to {left / 1e6:,.1f} MB of blobs any more: they stay, because a push at this "
            "moment may rely on them. To free them, copy the tags that you keep to another path, and "
            "delete this one"
        )
    return 0


def _remote(reference: str) -> Reference:
    found = _reference(reference)
    if not found.is_remote:
        raise UsageError(f"{reference}: expected a URL of a registry or a bucket, found a path")
    return found


@click.command(
    epilog="Examples:\n\n\b\n  prejit store\n  prejit store --pin sha256:...\n"
    "  prejit store --gc 100GB --days 30"
)
@click.option("--pin", metavar="DIGEST", help="Never let --gc remove this bundle.")
@click.option("--unpin", metavar="DIGEST", help="Let --gc remove this bundle again.")
@click.option("--gc", "keep", **SIZE, help="Remove bundles, the last used last, above this size.")
@click.option(
    "--days", type=Number(0, 1e5), metavar="N", help="With --gc: those not used for N days, too."
)
@click.option("--dry-run", is_flag=True, help="With --gc: remove nothing.")
@JSON
def store(
    pin: str | None,
    unpin: str | None,
    keep: int | None,
    days: float | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """List the bundles of this machine's store, keep some of them, or make room."""
    if keep is None and (days is not None or dry_run):
        raise UsageError("expected --gc SIZE beside --days and --dry-run, found none")
    check_one({"--pin": pin, "--unpin": unpin})
    here = machine_store()
    if pin or unpin:
        here.pin(pin or unpin or "", is_pinned=bool(pin))
    if keep is not None:
        age = float("inf") if days is None else days * 86_400
        done = here.collect(keep, age, dry_run=dry_run)
        if as_json:
            print_json(asdict(done))
        else:
            verb = "would remove" if dry_run else "removed"
            print_text(
                f"{verb} {done.bundles} bundles and {done.files} files, {done.freed_bytes / 1e6:,.1f} MB"
            )
        return 0
    found = here.bundles()
    if as_json:
        print_json({"path": here.name, "bundles": [asdict(each) for each in found]})
        return 0
    rows = [
        (
            each.name,
            each.digest,
            str(each.targets),
            f"{each.size / 1e6:,.1f} MB",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used)),
            "pinned" if each.is_pinned else "",
        )
        for each in found
    ]
    print_text(here.name)
    print_text(table(("bundle", "digest", "targets", "size", "used", ""), rows))
    return 0
