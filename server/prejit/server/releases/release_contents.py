"""Compare what two bundles say of themselves, before any of them runs: targets, programs, sizes, limits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from prejit.runtime.base.typed_json import from_json
from prejit.runtime.base.wording import few, size
from prejit.runtime.cli.command_options import bundle_files
from prejit.runtime.errors import RejectError, UsageError
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.bundle_schema import Config, ImageManifest, ProgramEntry
from prejit.runtime.format.layout import LayoutFiles
from prejit.runtime.format.names import CHAT_MEDIA_TYPE, GENERATION_MEDIA_TYPE
from prejit.runtime.format.opening import match, read_contents
from prejit.runtime.format.release_limits import DEFAULT_SHARES, SLO, ReleaseLimits
from prejit.runtime.format.root import Root, read_root
from prejit.runtime.machine.compare import compare
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement
from prejit.runtime.machine.fleet_machines import Machine
from prejit.runtime.ship.reference import is_reference, parse_reference

Outcome = Literal["passed", "failed", "noted"]


@dataclass(frozen=True, slots=True)
class ReleaseCheck:
    """One line of a verdict about a release.

    Attributes:
        name: what was compared, such as `first token`.
        outcome: `failed` stops the release; `noted` was not judged.
        old, new: what both have, as text.
        why: what was expected, or what differs; empty: nothing is to be said.
    """

    name: str
    outcome: Outcome
    old: str = ""
    new: str = ""
    why: str = ""


def judged(name: str, is_bad: bool, sides: Sequence[str], why: str = "") -> ReleaseCheck:
    """Return a check that failed or passed. `sides`: what the old and the new bundle have."""
    return ReleaseCheck(name, "failed" if is_bad else "passed", sides[0], sides[1], why)


@dataclass(frozen=True, slots=True)
class ReleaseContents:
    """The small files of a bundle.

    Attributes:
        path: its directory.
        digest: its digest.
        requirements: the requirement of each target by its name.
        target: the name of the target that this machine loads, or else of the closest one.
        why_not: why this machine loads none; empty: it does.
        config: the program table of that target.
        manifest: its manifest.
        defaults: its generation_config.json; empty: it has none.
        limits: its `[slo]`.
    """

    path: str
    digest: str
    requirements: Mapping[str, Requirement]
    target: str
    why_not: str
    config: Config
    manifest: ImageManifest
    defaults: Mapping[str, Any]
    limits: ReleaseLimits


def read_release(path: str, digest: str = "") -> ReleaseContents:
    """Read the tables of a bundle.

    Args:
        path: a directory, or a reference, of which only the tables are fetched.
        digest: the digest that it must have; empty: any.

    Raises:
        RejectError: it is damaged.
        StoreError: it cannot be read.
        UsageError: another bundle is there.
    """

    def read(layout: LayoutFiles, root: Root) -> ReleaseContents:
        targets = match(root, Fingerprint.current())
        chosen = min(targets, key=lambda each: each.verdict.distance)
        contents = read_contents(layout, chosen)
        return ReleaseContents(
            os.fspath(path),
            root.digest,
            {each.name: each.requirement for each in targets},
            chosen.name,
            chosen.verdict.reason(),
            contents.config,
            contents.manifest,
            _defaults(layout, contents.manifest),
            limits_of(contents.manifest, layout.blob_path(chosen.descriptor.digest)),
        )

    if is_reference(path):
        reference = parse_reference(path)
        with bundle_files(str(reference.at(digest)) if digest else path) as layout:
            found = read(layout, read_root(layout))
    else:
        found = read_whole(path, read)
    if digest not in ("", found.digest):
        raise UsageError(
            f"{path}: expected {digest}, which is served, found {found.digest}",
            hint="put each release into a directory of its own",
        )
    return found


def _defaults(layout: LayoutFiles, manifest: ImageManifest) -> dict[str, Any]:
    if not manifest.has_layer(GENERATION_MEDIA_TYPE):
        return {}
    found: dict[str, Any] = json.loads(layout.read_blob(manifest.layer(GENERATION_MEDIA_TYPE)))
    return found


def compare_contents(
    old: ReleaseContents, new: ReleaseContents, machines: Sequence[Machine] = ()
) -> tuple[list[ReleaseCheck], ReleaseLimits]:
    """Compare two bundles without running them.

    Args:
        old: the release that serves now.
        new: the one that is to take its place.
        machines: those of a fleet.

    Returns:
        The checks, and the limits that hold for the others: the stricter ones of both.
    """
    limits, loosened = stricter(old.limits, new.limits)
    checks = [
        *_limit_checks(old, new, loosened),
        _here_check(old, new),
        _target_check(old, new),
        *([_fleet_check(old, new, machines)] if machines else ()),
        _program_check(old.config, new.config),
        *_text_checks(old, new),
        *_size_checks(old, new, limits),
        *_accuracy_check(old.config, new.config, limits.share("max_perplexity_change")),
    ]
    return checks, limits


def _limit_checks(
    old: ReleaseContents, new: ReleaseContents, loosened: Sequence[str]
) -> Iterator[ReleaseCheck]:
    for name in loosened:
        was, now = (getattr(each.limits, name) for each in (old, new))
        why = "the limit of the old release holds for this one; the looser one holds for the next"
        yield ReleaseCheck(f"slo: {name}", "noted", _shown(was), _shown(now), why)


def _here_check(old: ReleaseContents, new: ReleaseContents) -> ReleaseCheck:
    """Check that this machine does not have to compile the new release, unless it compiles the old one."""
    shown = [each.target if not each.why_not else "none" for each in (old, new)]
    return judged("runs here", bool(new.why_not) and not old.why_not, shown, new.why_not)


_GLIBC = "2.27"
"""The glibc that jaxlib needs anyway (manylinux_2_27)."""
_ENOUGH_BYTES = 1 << 60


def _target_check(old: ReleaseContents, new: ReleaseContents) -> ReleaseCheck:
    """Check that each machine that just fits a target of the old release fits one of the new release."""
    lost = [
        name
        for name, needs in old.requirements.items()
        if not _is_served(new.requirements, _least_machine(needs))
    ]
    names = [few(tuple(side.requirements)) for side in (old, new)]
    if not lost:
        return judged("targets", False, names)
    machine = _least_machine(old.requirements[lost[0]])
    closest = min(
        (compare(name, needs, machine) for name, needs in new.requirements.items()),
        key=lambda each: each.distance,
    )
    why = (
        f"a machine that fits {few(tuple(lost))} and no more would compile; "
        f"{closest.target} is closest: {closest.reason()}"
    )
    return judged("targets", True, names, why)


def _least_machine(needs: Requirement) -> Fingerprint:
    """Return the machine that has what a requirement needs, and nothing beyond."""
    found = {each.name: getattr(needs, each.name) for each in fields(Requirement)}
    found |= {name: found[name] or () for name in ("xla_flags", "environment")}
    found["glibc"] = found["glibc"] or _GLIBC
    found["device_memory_bytes"] = _ENOUGH_BYTES  # sizes have a check of their own
    return Fingerprint(**found, cpu_model="", cpu_count=1, memory_bytes=_ENOUGH_BYTES)


def _is_served(requirements: Mapping[str, Requirement], machine: Fingerprint) -> bool:
    return any(compare(name, needs, machine).matches for name, needs in requirements.items())


def _fleet_check(
    old: ReleaseContents, new: ReleaseContents, machines: Sequence[Machine]
) -> ReleaseCheck:
    """Check that no machine of a fleet loses its target."""
    served = [
        {each.name for each in machines if _is_served(side.requirements, each.fingerprint)}
        for side in (old, new)
    ]
    texts = [f"{len(each)} of {len(machines)} load" for each in served]
    lost = sorted(served[0] - served[1])
    return judged("fleet", bool(lost), texts, f"would compile: {few(lost)}" if lost else "")


def _program_check(old: Config, new: Config) -> ReleaseCheck:
    """Check that what callers could ask for is still there: contexts, batches, functions, sentences."""
    bounds = _bounds(old, new).items()
    lost = [f"{name} {was} -> {now or 'none'}" for name, (was, now) in bounds if now < was]
    functions = [
        {_call_form(each) for each in side.programs if each.kind == "call"} for side in (old, new)
    ]
    lost += sorted({f"{name} as it was called" for name, *_ in functions[0] - functions[1]})
    for name in ("decoder", "encoder", "images"):
        before, after = (_behaviour(getattr(side, name)) for side in (old, new))
        lost += [
            f"{name}: {key} {value} -> {after.get(key, 'none')}"
            for key, value in before.items()
            if value != after.get(key)
        ]
    counts = [f"{len(side.programs)} programs" for side in (old, new)]
    return judged("programs", bool(lost), counts, "; ".join(lost))


def _bounds(old: Config, new: Config) -> dict[str, tuple[int, int]]:
    """Return the largest size of each axis that callers reach, in both."""
    wanted = {
        "longest context": ("decode", "context"),
        "largest batch": ("decode", "batch"),
        "largest source": ("encode", "source"),
        "largest batch of sentences": ("layer", "batch"),
        "longest sentence": ("layer", "length"),
        "largest batch of images": ("image", "batch"),
    }

    def most(side: Config, kind: str, axis: str) -> int:
        return max(
            (each.bucket.get(axis, 0) for each in side.programs if each.kind == kind), default=0
        )

    return {name: (most(old, *at), most(new, *at)) for name, at in wanted.items()}


def _call_form(entry: ProgramEntry) -> tuple[Any, ...]:
    """Return what a caller of a function relies on, at one bucket."""
    static = tuple(sorted((entry.static or {}).items()))
    trees = (entry.arguments_tree, entry.results_tree)
    return (entry.name, entry.arguments, entry.results, *trees, static)


_BEHAVIOUR = {
    *("vocab_size", "eos_token_ids", "bos_token_id", "start_token_ids", "source"),
    *("width", "pooling", "normalized", "scores", "prompts", "default_prompt"),
    *("labels", "size", "resize", "resample", "padding"),
    *("template", "instruction", "heads", "unweighted"),
}
"""Properties of a model that callers rely on."""


def _behaviour(model: Any) -> dict[str, Any]:
    if model is None:
        return {}
    return {
        each.name: getattr(model, each.name) for each in fields(model) if each.name in _BEHAVIOUR
    }


def _text_checks(old: ReleaseContents, new: ReleaseContents) -> Iterator[ReleaseCheck]:
    names = sorted({*old.defaults, *new.defaults})
    changed = [name for name in names if old.defaults.get(name) != new.defaults.get(name)]
    shown = [
        few(tuple(f"{name} {_shown(side.defaults.get(name))}" for name in changed))
        for side in (old, new)
    ]
    why = "a request that gives no options gets other tokens" if changed else ""
    yield judged("sampling", bool(changed), shown, why)
    chats = [each.manifest.has_layer(CHAT_MEDIA_TYPE) for each in (old, new)]
    if chats[0] and not chats[1]:
        yield ReleaseCheck("chat template", "failed", "there", "none", "chats are refused")


def _size_checks(
    old: ReleaseContents, new: ReleaseContents, limits: ReleaseLimits
) -> Iterator[ReleaseCheck]:
    was, now = (sum(layer.size for layer in side.manifest.layers) for side in (old, new))
    yield growth_check("bytes to fetch", was, now, limits.share("max_larger"), limits.bundle_bytes)
    was, now = (
        max((each.memory.need_bytes for each in side.config.programs), default=0)
        for side in (old, new)
    )
    yield growth_check("memory of programs", was, now, limits.share("max_more_memory"), None)


def growth_check(name: str, old: float, new: float, share: float, most: int | None) -> ReleaseCheck:
    """Check a number of bytes against that of the old release, and against a limit of its own.

    Args:
        name: what has so many bytes.
        old: the bytes of the old release.
        new: those of the new one.
        share: how much more the new one may have.
        most: the most that it may have in any case; None: any number.
    """
    why = []
    if new > old * (1 + share):
        why.append(f"expected at most {share * 100:g} % more, found {_percent(new, old)}")
    if most is not None and new > most:
        why.append(f"expected at most {size(most)}")
    return judged(name, bool(why), (size(int(old)), size(int(new))), "; ".join(why))


def _percent(new: float, old: float) -> str:
    return f"{(new / old - 1) * 100:.1f} %" if old else "some"


def _accuracy_check(old: Config, new: Config, most: float) -> Iterator[ReleaseCheck]:
    """Check what the builds measured on the same text, where both did."""
    before, after = old.accuracy, new.accuracy
    if after is None or (now := after.perplexity_millionths) is None:
        return
    was = None
    if before is not None and (before.text, before.tokens) == (after.text, after.tokens):
        was = before.perplexity_millionths
    if was is None:  # then the float32 model of the new release stands for the old one
        was = after.float32_perplexity_millionths
    if not was:
        return
    is_bad = now > was * (1 + most)
    why = f"expected at most {most * 100:g} % more, found {_percent(now, was)}" if is_bad else ""
    yield judged("perplexity", is_bad, (f"{was / 1e6:.3f}", f"{now / 1e6:.3f}"), why)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def limits_of(manifest: ImageManifest, path: str) -> ReleaseLimits:
    """Return the limits that a target's manifest carries.

    Args:
        manifest: the manifest.
        path: its file, for errors.

    Raises:
        RejectError: the annotation does not have the form that a build writes.
    """
    text = manifest.annotations.get(SLO, "{}")
    limits = from_json(ReleaseLimits, text.encode("ascii", "replace"), path)
    for name in DEFAULT_SHARES:
        try:
            limits.share(name)
        except ValueError as error:
            raise RejectError(path, f"{SLO}: {name}: {error}") from error
    return limits


def stricter(old: ReleaseLimits, new: ReleaseLimits) -> tuple[ReleaseLimits, tuple[str, ...]]:
    """Return the stricter limits of two releases, and the names of those that the new one loosens.

    A release is judged by the limits of the one before as well: it cannot loosen its own gate.
    """
    found: dict[str, Any] = {}
    loosened = []
    for name in (each.name for each in fields(ReleaseLimits)):
        was, now = _comparable(old, name), _comparable(new, name)
        is_stricter = now is not None and (was is None or now <= was)
        found[name] = getattr(new if is_stricter else old, name)
        if was is not None and not is_stricter:
            loosened.append(name)
    return ReleaseLimits(**found), tuple(loosened)


def _comparable(limits: ReleaseLimits, name: str) -> float | None:
    """Return a limit as a number: the smaller it is, the stricter. None: there is no limit."""
    if name in DEFAULT_SHARES:
        return limits.share(name)
    value: int | None = getattr(limits, name)
    return -value if name == "tokens_per_second" and value is not None else value


def described_limits(limits: ReleaseLimits) -> dict[str, int | str]:
    """Return the limits that hold, by name: those that are given, and the defaults."""
    given = {name: value for name, value in asdict(limits).items() if value is not None}
    return {**DEFAULT_SHARES, **given}
