"""Move a channel to another bundle: what it changes for each machine, then the copy and the tag.

    CHANNEL             the tag that servers follow
    CHANNEL-previous    what it led to before the last rollout; to go back is to roll this tag out

No registry moves a tag only if it still leads somewhere. So the tag is asked for right before and right after
it moves: a second rollout is noticed unless both come between the same two requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from prejit.compiler.fleet.machine_groups import merge
from prejit.runtime.errors import StoreError, UsageError
from prejit.runtime.fallback_reporting import closest_target
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.opening import OpenTarget, match
from prejit.runtime.format.root import Root, read_root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.fleet_machines import Machine
from prejit.runtime.ship.reference import MOST_TAG_LETTERS, REGISTRY, Reference, parse_reference
from prejit.runtime.ship.repository import BundleFiles, Repository, Shipment, shipment_of
from prejit.runtime.ship.shipping import (
    Counting,
    Report,
    missing_blobs,
    mountable,
    move_blobs,
    open_repository,
)

PREVIOUS = "-previous"
"""The tag that leads to the bundle before is that of the channel with this behind it."""


@dataclass(frozen=True, slots=True)
class MachineChange:
    """The effect of a rollout on machines with equal fingerprints.

    Attributes:
        machines: their names.
        before, after: the target that they load, or else the closest one; empty: there is no bundle before.
        was_served, is_served: whether it fits. If not, its programs are compiled there.
        why_before, why: each axis that does not match, with both values.
        fetched_bytes: blobs that the target needs and the one before lacks. Each machine fetches so much, or
            less where chunks of a large blob are the same.
    """

    machines: tuple[str, ...]
    before: str
    was_served: bool
    why_before: str
    after: str
    is_served: bool
    why: str
    fetched_bytes: int


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """A rollout before anything moves.

    Attributes:
        channel, previous: the tags.
        before: digest of the bundle that the channel leads to; empty: the channel is new.
        after: digest of the bundle to which it moves.
        copied_bytes: what the channel's repository lacks.
        changes: what it means for each kind of machine; empty: no fleet was given.
    """

    channel: str
    previous: str
    before: str
    after: str
    copied_bytes: int
    changes: tuple[MachineChange, ...]

    @property
    def losing(self) -> tuple[str, ...]:
        """The machines that load a target now and would compile."""
        lost = (each for each in self.changes if each.was_served and not each.is_served)
        return tuple(sorted(name for each in lost for name in each.machines))

    def described(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON."""
        return asdict(self) | {"losing": self.losing}


class Rollout:
    """A rollout whose bundles are open: `plan` says what it does, `move` does it."""

    def __init__(self, channel: str, new: str, machines: Sequence[Machine]) -> None:
        """Read both bundles' manifests, and compare all machines with them.

        Args:
            channel: a reference with the tag that servers follow.
            new: a reference or path, a digest in the channel's repository, or empty: the bundle before.
            machines: the fleet; empty: nobody asks.

        Raises:
            UsageError: `channel` has no tag that can move, or `new` is no whole digest.
            StoreError: a place does not answer, or there is no such bundle.
            RejectError: a bundle is damaged.
        """
        self._channel = _channel_of(channel)
        self._previous = replace(self._channel, tag=self._channel.tag + PREVIOUS)
        self._place = open_repository(self._channel)
        source = self._previous
        if new.startswith("sha256:"):
            source = parse_reference(f"{self._channel.place}@{new}")
            # A bucket knows by a tag alone what is attached.
            tags = () if self._channel.scheme == REGISTRY else self._place.tags()
            tag = next((each.tag for each in tags if each.digest == new), "")
            source = replace(source, tag=tag)
        elif new:
            source = parse_reference(new)
        self._resolved = self._place.resolve(self._channel.tag)
        if not new and not self._place.resolve(self._previous.tag):
            raise StoreError(
                f"{self._channel}: expected a bundle to go back to, found no tag {self._previous.tag}",
                hint="each rollout but the first leaves one; name the bundle instead",
            )
        new_place = self._place if source.place == self._channel.place else open_repository(source)
        self._new = _OpenBundle(new_place, source)
        self._old = _OpenBundle(self._place, self._channel) if self._resolved else None
        self._missing = missing_blobs(self._new.shipment, self._place)
        self._mounts_from = mountable(source, self._channel)
        self.plan = RolloutPlan(
            str(self._channel),
            str(self._previous),
            "" if self._old is None else self._old.root.digest,
            self._new.root.digest,
            sum(at.size for at in self._missing),
            _changes(self._old, self._new, machines),
        )

    def move(self, report: Report = lambda _: None) -> None:
        """Copy what the channel's repository lacks, remember the bundle before, and move the tag.

        Raises:
            StoreError: a place does not answer, or another rollout moved the channel meanwhile.
            RejectError: what arrives is not what its digest names.
        """
        place, shipment = self._place, self._new.shipment
        counting = Counting(self._missing, report)
        move_blobs(self._new.files, self._missing, place, counting, self._mounts_from)
        self._check(self._resolved, "while this one copied: nothing of the channel was changed")
        if self._old is not None:
            place.publish(self._old.shipment, self._previous.tag)
        place.publish(shipment, self._channel.tag)
        self._check(shipment.digest, "at the same moment, and its bundle is the channel's now")

    def _check(self, expected: str, when: str) -> None:
        found = self._place.resolve(self._channel.tag)
        if found != expected:
            raise StoreError(
                f"{self._channel}: expected {expected or 'no tag'}, found {found or 'no tag'}: another "
                f"rollout moved it {when}",
                hint="find out which bundle is right, then roll it out again",
            )


class _OpenBundle:
    """A bundle of a rollout, with all its targets."""

    def __init__(self, place: Repository, reference: Reference) -> None:
        self.files: BundleFiles = place.open(reference.tag, reference.digest)
        self.root: Root = read_root(self.files)
        self.shipment: Shipment = shipment_of(self.files, self.root, self.root.bundle.manifests)

    def choose(self, machine: Fingerprint) -> OpenTarget:
        """Return the target that a machine loads, or else the closest one."""
        targets = match(self.root, machine)
        return next((at for at in targets if at.verdict.matches), None) or closest_target(targets)

    def needed(self, target: Descriptor) -> dict[str, int]:
        """Return the sizes of what a machine fetches of a target, by digest."""
        shipment = shipment_of(self.files, self.root, (target,))
        every = (*shipment.blobs, *(document.at for document in shipment.documents))
        return {at.digest: at.size for at in every}


def _channel_of(text: str) -> Reference:
    channel = parse_reference(text)
    if not channel.is_remote or not channel.tag or channel.digest:
        raise UsageError(
            f"{text}: expected a tag of a registry or a bucket, which servers follow",
            hint="such as oci://HOST/REPOSITORY:prod",
        )
    if len(channel.tag) > MOST_TAG_LETTERS - len(PREVIOUS):
        raise UsageError(
            f"{text}: expected a tag of at most {MOST_TAG_LETTERS - len(PREVIOUS)} letters, found "
            f"{len(channel.tag)}: the bundle before gets it with {PREVIOUS} behind it"
        )
    return channel


def _changes(
    old: _OpenBundle | None, new: _OpenBundle, machines: Sequence[Machine]
) -> tuple[MachineChange, ...]:
    """Return what changes, the machines that would compile first, then by their number."""
    found = defaultdict[MachineChange, list[str]](list)
    for alike in merge(machines):
        machine = alike[0].fingerprint
        after = new.choose(machine)
        before = None if old is None else old.choose(machine)
        here = old.needed(before.descriptor) if old is not None and before is not None else {}
        fetched = new.needed(after.descriptor).items()
        change = MachineChange(
            (),
            "" if before is None else before.name,
            before is not None and before.verdict.matches,
            "" if before is None else before.verdict.reason(),
            after.name,
            after.verdict.matches,
            after.verdict.reason(),
            sum(size for digest, size in fetched if digest not in here),
        )
        found[change] += [each.name for each in alike]
    changes = [replace(each, machines=tuple(sorted(names))) for each, names in found.items()]
    return tuple(sorted(changes, key=lambda each: (each.is_served, -len(each.machines))))
