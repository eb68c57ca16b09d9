"""`load`: from the directory of a bundle to programs that run, in a fixed order.

    open -> index -> fingerprint -> manifests -> policy -> map -> config -> kernels -> begin to verify -> run

There are two kinds of failure, and they are never mixed. A mismatch (this machine matches none of the
targets) falls back to compiling the portable programs, with a warning that names the axis, or raises
MismatchError if the caller prefers that. Damage (a bundle that is corrupt, forged or oversized) always raises
RejectError.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from prejit.runtime.base import arguments
from prejit.runtime.base.process_facts import LoadTimes, importing, policy_paths, span
from prejit.runtime.device.quick_start import collector_off, import_ahead, unmap_library_pages
from prejit.runtime.errors import KernelError, RejectError, UntrustedWarning, UsageError
from prejit.runtime.format.blobs import Blobs, read_whole
from prejit.runtime.format.bundle_schema import Config, ImageManifest
from prejit.runtime.format.checks.layers import check_kernels
from prejit.runtime.format.layout import TargetFiles
from prejit.runtime.format.names import (
    GENERATION_MEDIA_TYPE,
    KERNELS_MEDIA_TYPE,
    TOKENIZER_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.opening import OpenTarget, check_config_blob, match, read_manifests
from prejit.runtime.format.root import Root, read_root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.kept_files import Receipts
from prejit.runtime.records import dataclass, replace
from prejit.runtime.verdict import Axis

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.runtime.device.kernels import Handlers
    from prejit.runtime.ship.arriving_bundle import ArrivingBundle
    from prejit.runtime.ship.shipping import Report, TransferProgress

_log = logging.getLogger(__name__)
logging.getLogger("prejit.runtime").addHandler(logging.NullHandler())
_loads = itertools.count()
"""Counts the calls of `load` in this process."""
_CALLER = 3
"""Stack level of the user's code for a warning in `load`, whose decorator has a frame."""


@collector_off()
def load(
    path: str | os.PathLike[str],
    *,
    on_mismatch: Literal["jit", "error"] = "jit",
    while_compiling: Literal["wait", "smaller"] = "wait",
    on_fallback: Callable[[Axis], object] | None = None,
    fingerprint: Fingerprint | None = None,
    types: Iterable[type[Any]] | Mapping[str, type[Any]] = (),
    generation_config: bool = True,
    trust: str | os.PathLike[str] | None = None,
    canary: Literal["off", "one", "all"] = "one",
    on_transfer: Callable[[TransferProgress], object] | None = None,
) -> Bundle:
    """Load a bundle: check this machine, map the weights and begin to verify them.

    Args:
        path: the directory of the bundle, or a reference such as `oci://HOST/REPOSITORY:TAG`, `s3://BUCKET/PATH`
            or `https://HOST/PATH@sha256:...`. What this machine lacks of it is fetched into its store
            (`ship.machine_store`), after the trust policies have allowed it. The weights may still be on the
            way when this returns: the first request waits for them.
            `wheel:NAME` is the bundle in an installed package of `prejit wheel`.
        on_mismatch: what to do if this machine matches none of the bundle's targets. `jit`: compile the
            portable programs, with a FallbackWarning. `error`: raise. It decides in the same way about calls
            with sizes that the manifest leaves open and that are no bucket.
        while_compiling: what a request does while its best programs compile. `wait`: it waits for them.
            `smaller`: it uses programs that are ready, for example a smaller prefill bucket in more chunks or
            a larger batch or context bucket, and the best ones compile in the background, the smallest
            first. It waits only if no ready program can serve it. The tokens are the same. `call` always
            waits, because its arguments fit one bucket only.
        on_fallback: called once for each axis of the closest target that caused a fallback, for example to
            count it: `lambda axis: counter.labels(axis.name).inc()`. See also `fallback_counts`.
        fingerprint: treat this machine as the one with this fingerprint; None: as what it is. Executables are
            loaded only if this machine matches as well.
        types: classes of named tuples and dataclasses that programs of the user return. A mapping gives the
            name that each had at build time, `module:Name`. Results of other classes get a substitute.
        generation_config: whether calls that give no sampling options use those of the model's
            generation_config.json. If not, they take prejit's own: the most likely token, until a stop token.
        trust: the file of a trust policy, which must let the bundle run. Those in /etc/prejit/trust.toml and
            $PREJIT_TRUST apply as well: each can refuse what the others allow.
        canary: which executables must give the golden answer of their build when this machine loads them for
            the first time. `one`: the first that is used; if it is wrong, all. `all`: every one. `off`: none.
            The answer is remembered, so that later starts ask nothing. If it is wrong, the executable is in
            quarantine on this machine and never runs again, whatever `canary` says: `on_mismatch` decides
            whether its portable program is compiled in its place.
        on_transfer: called by any thread as the bytes of a reference arrive: how many have, and how many
            must.

    Returns:
        The bundle. Its programs become ready when they are first used.

    Raises:
        StoreError: the directory cannot be opened.
        RejectError: the bundle is damaged. Damage in a layer of more than 1 MB may be found later: the first
            request that needs its bytes raises this error, and no request ends before all files of the target
            are verified. Files of other targets are not read: `prejit verify` checks them.
        UntrustedError: a trust policy does not let the bundle run. Nothing of it was loaded.
        PolicyError: a trust policy cannot be read, or its package `cryptography` is not installed.
        MismatchError: this machine matches no target, and on_mismatch is `error`. The request that uses a
            program raises AnswerError, which is one, if the executable gives a wrong answer.
        UsageError: `prejit record` wrote the bundle.
    """
    with importing():
        import_ahead()
    started, is_first = time.perf_counter(), next(_loads) == 0
    path = arguments.path("path", path)
    arguments.choice("on_mismatch", on_mismatch, ("jit", "error"))
    arguments.choice("canary", canary, ("off", "one", "all"))
    arguments.choice("while_compiling", while_compiling, ("wait", "smaller"))
    arguments.function("on_fallback", on_fallback)
    arguments.function("on_transfer", on_transfer)
    if fingerprint is not None:
        arguments.instance("fingerprint", fingerprint, Fingerprint)
    named = arguments.classes("types", types)
    uses_defaults = arguments.flag("generation_config", generation_config)
    policies = policy_paths(None if trust is None else arguments.path("trust", trust))
    machine = Fingerprint.current()
    must_match = on_mismatch == "error"
    open_ = partial(
        _open, machine=machine, declared=fingerprint, must_match=must_match, policies=policies
    )
    given, digest, arriving = os.fspath(path), "", None
    if "://" in given or given.startswith("wheel:"):
        path, digest, arriving = _fetched(
            given, fingerprint or machine, must_match, policies, on_transfer
        )
    opening = time.perf_counter()
    opened = read_whole(path, open_) if arriving is None else open_(arriving, read_root(arriving))
    if digest not in ("", opened.digest):  # another process has written to the store
        raise RejectError(str(opened.layout.path), f"expected {digest}, found {opened.digest}")
    reading = span("reading", opening)
    for text in opened.reported:
        warnings.warn(text, UntrustedWarning, stacklevel=_CALLER)
    choice = _choose(opened, must_match)
    _log_choice(opened, choice)
    # Beside what comes: those layers first that the first token needs. `_choose` has checked what it read.
    manifest, blobs = opened.manifests[choice.target.name], opened.blobs
    blobs.begin(manifest, choice.config.chunks or {}, _NEEDED_FIRST)
    with importing():
        from prejit.runtime.bundle import Bundle
    blobs.verification.wait_for_small()
    if not choice.matched:
        from prejit.runtime import fallback_reporting

        fallback_reporting.count_fallback(choice.target.verdict, on_fallback)
        portable = choice.config.portable
        for warning in fallback_reporting.fallback_warnings(
            opened.layout, choice.target, portable, machine
        ):
            warnings.warn(warning, stacklevel=_CALLER)
    sizes = blobs.hashed_bytes, blobs.receipt_bytes, blobs.verity_bytes
    times = LoadTimes(started, is_first, (reading, *blobs.reads), *sizes)
    bundle = Bundle(
        opened.digest,
        choice.config,
        blobs.layers(manifest),
        tuple(target.verdict for target in choice.targets),
        machine=machine,
        matched=choice.matched,
        times=times,
        serve_smaller=while_compiling == "smaller",
        kernels=choice.kernels,
        no_libraries=choice.no_libraries,
        types=named,
        compiles=not must_match,
        generation_config=uses_defaults,
        canary=canary,
        on_fallback=on_fallback,
        arriving=arriving,
        policies=policies,
    )
    if is_first:
        unmap_library_pages()
    return bundle


def _fetched(
    reference: str,
    machine: Fingerprint,
    must_match: bool,
    policies: Sequence[str],
    report: Report | None,
) -> tuple[str, str, ArrivingBundle | None]:
    """Return the directory of a bundle of the store or a wheel, its digest, and itself if on the way."""
    with importing():
        from prejit.runtime.ship.machine_store import machine_store
        from prejit.runtime.ship.pulling import Wanted, arrive
        from prejit.runtime.ship.reference import parse_reference
    found = parse_reference(reference)
    if not found.is_remote:
        return found.place, "", None
    wanted = Wanted(machine, must_match=must_match)
    store = machine_store()
    path, digest, arriving = arrive(found, store, wanted, policies, report or (lambda _: None))
    return str(path), digest, arriving


@dataclass(frozen=True, slots=True)
class _Opened:
    """A bundle that is open and not verified yet.

    Attributes:
        layout: its files.
        digest: its digest.
        targets: all targets with their verdicts, the best first.
        manifests: by name, of the targets that may be served: those that match, or else the closest.
        blobs: the blobs of these manifests.
        reported: what trust policies report about these targets and do not refuse.
    """

    layout: TargetFiles
    digest: str
    targets: tuple[OpenTarget, ...]
    manifests: Mapping[str, ImageManifest]
    blobs: Blobs
    reported: tuple[str, ...]


def _open(
    layout: TargetFiles,
    root: Root,
    *,
    machine: Fingerprint,
    declared: Fingerprint | None,
    must_match: bool,
    policies: Sequence[str],
) -> _Opened:
    """Compare the machine with every target, and open the blobs of those that may be served.

    Policies decide about these first, and may want a child process to load them before this one does.
    """
    targets = match(root, machine)
    if declared is not None:
        # A target must match both machines. The declared one may lack features that this one has, but it
        # cannot add instructions to it: those would end in SIGILL.
        here = {target.name: target for target in targets}
        targets = tuple(
            here[target.name] if target.verdict.matches else target
            for target in match(root, declared)
        )
    candidates = [target for target in targets if target.verdict.matches]
    if not candidates:
        from prejit.runtime import fallback_reporting

        if must_match:
            raise fallback_reporting.mismatch(layout, targets)
        candidates = [fallback_reporting.closest_target(targets)]
    manifests = read_manifests(layout, targets)
    reported: tuple[str, ...] = ()
    if not policies:
        _log.info("%s: no trust policy applies", layout.path)
    else:
        with importing():
            from prejit.runtime.trust.enforcing import enforce
        reported, wanted_by = enforce(policies, layout, root, candidates, manifests)
        if wanted_by is not None:
            from prejit.runtime.trust.first_load import FirstLoad, check_first_load

            wanted = FirstLoad(str(layout.path), candidates, must_match, declared, policies)
            check_first_load(wanted, machine, wanted_by)
    served = {target.name: manifests[target.name] for target in candidates}
    blobs = Blobs(
        layout, served.values(), Receipts(layout.blobs_root, is_shared=layout.has_shared_blobs)
    )
    return _Opened(layout, root.digest, targets, served, blobs, reported)


def _log_choice(opened: _Opened, choice: _Choice) -> None:
    why = "it matches" if choice.matched else "none matches, and it is the closest"
    path = opened.layout.path
    _log.info("%s, %s: chose target %s: %s", path, opened.digest, choice.target.name, why)
    for verdict in (target.verdict for target in choice.targets):
        if not verdict.matches:
            _log.info("%s: target %s does not match: %s", path, verdict.target, verdict.reason())
        elif verdict.target != choice.target.name:
            _log.info("%s: target %s matches too, and comes after it", path, verdict.target)
    if choice.no_libraries:
        _log.info("%s: its libraries are not loaded: %s", path, choice.no_libraries)


_NEEDED_FIRST = (TOKENIZER_MEDIA_TYPE, GENERATION_MEDIA_TYPE, WEIGHTS_MEDIA_TYPE)
"""Layers that the first token needs and that have no digests of their own in the program table."""


class _Choice(NamedTuple):
    """The target that is served.

    Attributes:
        target: the target.
        matched: whether its executables run here; if not, its portable programs are compiled.
        config: its program table.
        kernels: the handlers of its kernels, loaded into this process; None: it has none, or is not matched.
        no_libraries: why its libraries of the user are not registered; empty: they are, or it has none.
        targets: all targets; the verdict of a target whose kernels or libraries do not load here is no match.
    """

    target: OpenTarget
    matched: bool
    config: Config
    kernels: Handlers | None
    no_libraries: str
    targets: tuple[OpenTarget, ...]


def _choose(opened: _Opened, must_match: bool) -> _Choice:
    """Return the first target that matches and whose native code loads here, or else the closest."""
    targets = opened.targets
    while matching := next((target for target in targets if target.verdict.matches), None):
        config = _read_config(opened, matching)
        try:
            kernels = _load_kernels(opened, matching, config)
        except KernelError as error:
            assert config.kernels is not None
            needed = f"a library for {config.kernels.level} by {config.kernels.compiler}"
            targets = _without(targets, matching, "kernels", needed, error)
            continue
        try:
            _register_libraries(opened, matching, config)
        except KernelError as error:
            needed = ", ".join(library.name for library in config.libraries or ())
            targets = _without(targets, matching, "libraries", needed, error)
            continue
        return _Choice(matching, True, config, kernels, "", targets)
    from prejit.runtime import fallback_reporting

    if must_match:
        raise fallback_reporting.mismatch(opened.layout, targets)
    closest = fallback_reporting.closest_target(
        [target for target in targets if target.name in opened.manifests]
    )
    config = _read_config(opened, closest)
    # Portable programs call the user's libraries, too. What the machine lacks may end the process: SIGILL.
    unfit = [axis for axis in closest.verdict.mismatches if axis.name in _LIBRARY_AXES]
    reason = replace(closest.verdict, axes=tuple(unfit)).reason() if unfit else ""
    if not unfit:
        try:
            _register_libraries(opened, closest, config)
        except KernelError as error:
            reason = str(error)
    return _Choice(closest, False, config, None, reason, targets)


_LIBRARY_AXES = ("platform", "architecture", "cpu_features", "glibc", "libraries")
"""The axes on which a machine must match for the libraries of a target to be loaded."""


def _read_config(opened: _Opened, target: OpenTarget) -> Config:
    """Read and check the config of a target."""
    manifest = opened.manifests[target.name]
    config = check_config_blob(opened.layout, target, manifest, opened.blobs.read(manifest.config))
    if config.recorded is not None:
        path = opened.layout.path
        raise UsageError(
            f"{path}: expected a bundle that `prejit build` wrote, found one of `prejit record`, whose "
            "files only jax loads",
            hint=f"start the program with: prejit run {path} -- COMMAND",
        )
    return config


def _load_kernels(opened: _Opened, target: OpenTarget, config: Config) -> Handlers | None:
    """Load the kernels of a target into this process, and return their handlers; None: it has none."""
    if config.kernels is None:
        return None
    from prejit.runtime.device import kernels

    at = opened.manifests[target.name].layer(KERNELS_MEDIA_TYPE)
    content = opened.blobs.read(at)
    check_kernels(content, config.kernels, opened.layout.blob_path(at.digest))
    _log.debug("loading its kernels %s", at.digest)
    return kernels.load(content)


def _register_libraries(opened: _Opened, target: OpenTarget, config: Config) -> None:
    """Load the libraries of the user that a target has into this process, and register their handlers.

    All are verified before the first is loaded.
    """
    if config.libraries is None:
        return
    from prejit.runtime.device import kernels
    from prejit.runtime.format.checks.seldom_parts import check_library

    layers = {at.digest: at for at in opened.manifests[target.name].layers}
    contents = [opened.blobs.read(layers[library.digest]) for library in config.libraries]
    for library, content in zip(config.libraries, contents, strict=True):
        path = opened.layout.blob_path(library.digest)
        check_library(content, library, config.requirement.architecture, path)
    for library, content in zip(config.libraries, contents, strict=True):
        _log.debug("loading its library %s, %s", library.name, library.digest)
        symbols = sorted(set(library.handlers.values()))
        kernels.register(kernels.load_library(content, symbols, library.name))


def _without(
    targets: Sequence[OpenTarget], refused: OpenTarget, name: str, needed: str, error: KernelError
) -> tuple[OpenTarget, ...]:
    """Return the targets after one of them turned out not to match: its native code does not load here.

    `name` is that of the axis: `kernels` or `libraries`.
    """
    axis = Axis(name, "can be loaded", needed, str(error), False)
    verdict = replace(refused.verdict, axes=(*refused.verdict.axes, axis))
    return tuple(t._replace(verdict=verdict) if t is refused else t for t in targets)
