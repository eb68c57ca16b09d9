"""The base of every loaded bundle: its parts, its end, its programs, and how it started."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from prejit.runtime.base.process_facts import LoadTimes, is_plain_start, span
from prejit.runtime.base.threads_and_forks import OneProcess, disown_in_forks
from prejit.runtime.device.device import Device
from prejit.runtime.errors import ClosedError
from prejit.runtime.format.blobs import Layer
from prejit.runtime.format.bundle_schema import Config
from prejit.runtime.format.checks.program_table import check_weight_sets
from prejit.runtime.format.names import (
    DRAFT,
    EXECUTABLES_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.machine.kept_files import first_programs, remember_first_programs
from prejit.runtime.programs.mapped_weights import open_weights
from prejit.runtime.programs.ready_programs import Programs
from prejit.runtime.text.bundle_text import BundleText
from prejit.runtime.verdict import Axis, Verdict

if TYPE_CHECKING:
    from prejit.runtime.device.kernels import Handlers
    from prejit.runtime.encoding.encoder import EncoderPrograms
    from prejit.runtime.machine.fingerprint import Fingerprint
    from prejit.runtime.programs.canary import Checks
    from prejit.runtime.programs.dispatched_calls import DispatchedCalls
    from prejit.runtime.text.tokenizer import Tokenizer


class BundleUser(Protocol):
    """Whatever holds threads that use a bundle, such as an engine."""

    def close(self) -> None:
        """End its threads."""

    def disown(self, reason: ClosedError) -> object:
        """Refuse all calls in a forked process, and return what must not be freed there."""


class _Parts(NamedTuple):
    """The parts of an open bundle, which `close` drops.

    Attributes:
        layers: verified layers by media type.
        text: the tokenizer and the chat templates.
        programs: the programs of the target, and the device where they run.
    """

    layers: Mapping[str, Layer]
    text: BundleText
    programs: Programs


_CACHED = ("decoder", "generator", "encoder", "images", "user_programs", "dispatched", "on_jax")
"""Properties that hold parts of an open bundle."""


class LoadedBundle(OneProcess):
    """A loaded bundle without what it does: `Bundle` adds that."""

    def __init__(
        self,
        digest: str,
        config: Config,
        layers: dict[str, Layer],
        verdicts: tuple[Verdict, ...],
        *,
        machine: Fingerprint,
        matched: bool,
        times: LoadTimes,
        serve_smaller: bool,
        kernels: Handlers | None,
        no_libraries: str,
        types: Mapping[str, type[Any]],
        compiles: bool,
        generation_config: bool,
        canary: Checks,
        on_fallback: Callable[[Axis], object] | None,
        arriving: BundleUser | None,
        policies: Sequence[str],
    ) -> None:
        """Bind verified layers to a device. Use `prejit.runtime.load`."""
        self.name = config.bundle
        self.digest = digest
        self.target = config.target
        self.matched = matched
        self.verdicts = verdicts
        self.config = config
        self._types = types
        self._compiles = compiles
        self._generation_config, self._policies = generation_config, policies
        device = Device(machine.platform, config.mesh)
        if kernels is not None:  # before any executable is loaded that calls them
            from prejit.runtime.device.kernels import register

            register(kernels)
        weights = layers.get(WEIGHTS_MEDIA_TYPE)
        opened = None if weights is None else open_weights(weights)
        portable = layers[PORTABLE_MEDIA_TYPE]
        shapes = {} if opened is None else {n: value.shape for n, value in opened.values.items()}
        check_weight_sets(config, shapes, (weights or portable).path)
        asks = None
        if matched and any(program.golden is not None for program in config.programs):
            from prejit.runtime.programs.canary import Canary  # only golden answers need it

            asks = Canary(
                config,
                "" if weights is None else weights.digest,
                machine,
                checks=canary,
                compiles=compiles,
                on_fallback=on_fallback,
            )
        calls: dict[str, str] = {}
        if config.libraries is not None and not no_libraries:
            from prejit.runtime.format.checks.seldom_parts import handler_names  # few have any

            calls = handler_names(*config.libraries)
        programs = Programs(
            config,
            device,
            layers[EXECUTABLES_MEDIA_TYPE] if matched else None,
            portable,
            opened,
            serve_smaller=serve_smaller,
            calls=calls,
            no_calls=no_libraries,
            canary=asks,
        )
        text = BundleText(config.bundle, layers)
        self._arriving = arriving  # its threads end when this object does
        self._users = weakref.WeakSet[BundleUser]([arriving] if arriving is not None else [])
        self._parts: _Parts | None = _Parts(layers, text, programs)
        self._is_forked = False
        if config.decoder is not None and matched and not is_plain_start():
            programs.expect(
                first_programs(digest), lambda names: remember_first_programs(digest, names)
            )
        self._begin_loading()
        disown_in_forks(self, LoadedBundle._disown)
        self.times = times
        self.loaded = span("loading", times.started)
        self.load_seconds = self.loaded.end - times.started

    def _begin_loading(self) -> None:
        """Begin what the first result needs, while threads verify."""

    def close(self) -> None:
        """Free the bundle: its memory on the device, its mapped files and its threads.

        It closes its engines first. Later calls raise ClosedError; closing again does nothing. Calls that
        still run end with a result or with ClosedError. A program that is being compiled is waited for.
        Sessions, batches, prefixes and bound programs hold their own arrays until they are dropped, and
        native libraries stay in the process.
        """
        for user in list(self._users):
            user.close()
        parts, self._parts = self._parts, None
        if parts is None:
            return
        reason = self._closed()
        cached = {name: vars(self).pop(name, None) for name in _CACHED}
        encoder: EncoderPrograms | None = cached["encoder"]
        dispatched: DispatchedCalls | None = cached["dispatched"]
        parts.programs.verification.stop(reason)
        if encoder is not None:
            encoder.close()
        parts.programs.close(reason)
        if dispatched is not None:
            dispatched.close()
        held = [parts.programs.device.first.client]
        del parts, cached, encoder, dispatched
        from prejit.runtime.device._jax_parts import free_dropped

        free_dropped(held)

    def _disown(self) -> object:
        """Refuse all calls, in a forked process. See `disown_in_forks`."""
        parts, self._parts = self._parts, None
        if parts is None:
            return None
        self._is_forked = True
        reason = self._closed()
        parts.programs.verification.refuse(reason)
        return (
            parts,
            [vars(self).pop(name, None) for name in (*_CACHED, "_once")],
            parts.programs.refuse(reason),
            [user.disown(reason) for user in self._users],
        )

    def close_first(self, user: BundleUser) -> None:
        """Have `close` end this user before it frees the bundle, unless it is dropped earlier."""
        self._open  # noqa: B018 (a closed bundle has no use)
        self._users.add(user)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _open(self) -> _Parts:
        """The parts of an open bundle."""
        if (parts := self._parts) is None:
            raise self._closed()
        return parts

    def _closed(self) -> ClosedError:
        if self._is_forked:
            return ClosedError(
                f"{self.name}: expected a bundle that this process loaded, found one of the process that it "
                "was forked from, whose threads it does not have",
                hint="load it in the child, or start processes with multiprocessing's spawn or forkserver",
            )
        return ClosedError(
            f"{self.name}: expected an open bundle, found one that is closed",
            hint="load it again with `prejit.runtime.load`",
        )

    @property
    def _programs(self) -> Programs:
        return self._open.programs

    @property
    def text(self) -> BundleText:
        """The tokenizer and the chat templates, where the bundle has them."""
        return self._open.text

    @property
    def has_tokenizer(self) -> bool:
        """True if prompts may be text."""
        return self.text.has_tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the bundle, for callers that need token ids or texts of their own.

        Raises:
            UsageError: the bundle has none.
            RejectError: it is damaged.
        """
        return self.text.need_tokenizer()

    @property
    def has_chat_template(self) -> bool:
        """True if the bundle has a template for `apply_chat_template`."""
        return self.text.has_chat_template

    def finish(self) -> None:
        """Wait until all bytes of the target are verified, before a caller gets a result.

        Raises:
            RejectError: the bundle is damaged.
        """
        programs = self._programs
        programs.verification.finish()
        programs.answer()

    def prepare(self, *names: str) -> None:
        """Make these programs ready now, or all that run here. Others become ready when they are first used.

        Raises:
            RejectError: a program is damaged.
        """
        programs = self._programs
        rests = ("copy", f"{DRAFT}copy") if programs.device.cpu_sharding is not None else ()
        for name in names or [n for n, each in programs.table.items() if each.kind not in rests]:
            programs[name]
