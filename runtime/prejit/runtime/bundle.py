"""A loaded bundle: the object that a server holds.

`loaded_bundle` has what is true of every bundle. What only some bundles do stands beside it, and is imported
when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, final

from prejit.runtime.base.process_facts import importing
from prejit.runtime.loaded_bundle import LoadedBundle

if TYPE_CHECKING:
    from prejit.runtime.bundle_batches import BundleBatches
    from prejit.runtime.bundle_calls import BundleCalls
    from prejit.runtime.bundle_chats import BundleChats
    from prejit.runtime.bundle_encodes import BundleEncodes
    from prejit.runtime.bundle_upkeep import BundleUpkeep

    class _Able(BundleBatches, BundleCalls, BundleChats, BundleEncodes, BundleUpkeep): ...

else:
    _Able = LoadedBundle


@final
class Bundle(_Able):
    """A loaded bundle. Safe to use from many threads. A context manager closes it at its end.

    Attributes:
        name: the name of the bundle.
        digest: the digest of the bundle, its name in registries and logs.
        target: the target whose programs these are.
        matched: whether this machine matches that target; if not, programs are compiled here.
        verdicts: the comparison of this machine with each target.
        config: the program table.
        load_seconds: how long `load` took.
    """

    def _begin_loading(self) -> None:
        if self.config.decoder is not None:
            with importing():  # what the first token needs
                import_module("prejit.runtime.bundle_decodes")
        if self.config.encoder is not None and self.matched:
            self.encoder.start_loading(lambda: self.text.tokenizer)


_BESIDE = {
    "BundleCalls": (
        *("bind", "call", "call_async", "call_by_path", "call_on_device", "dispatched", "on_jax"),
        *("runner_with_zeros", "user_programs"),
    ),
    "BundleChats": ("apply_chat_template", "render_chat_template"),
    "BundleBatches": (
        *("adapters", "batch", "generate", "generate_batch", "generate_n", "prefix", "request"),
        "session",
    ),
    "BundleDecodes": ("decoder", "defaults", "generator", "stream"),
    "BundleUpkeep": (
        *("check_answers", "check_finite", "device_memory_bytes", "hlo_modules", "report", "sleep"),
        *("start_report", "timed_runner", "wake", "watch_runs", "wrong_answers"),
    ),
    "BundleEncodes": (
        *("embed_images", "encode", "encode_batch", "encoder", "image_labels", "images", "score"),
        "score_images",
    ),
}
"""The methods and properties of `Bundle` that only some bundles have, by the class that has them."""


class _Beside:
    """A method or property of `Bundle` until it is first used: then it is imported and takes this place."""

    def __init__(self, kind: str, name: str) -> None:
        self._kind, self._name = kind, name

    def __get__(self, bundle: Bundle | None, owner: type[Bundle]) -> Any:
        module = f"bundle_{self._kind.removeprefix('Bundle').lower()}"
        with importing():
            kind = getattr(import_module(f"prejit.runtime.{module}"), self._kind)
        for name, part in vars(kind).items():
            if not name.startswith("__"):
                setattr(owner, name, part)
        return vars(owner)[self._name].__get__(bundle, owner)


for _kind, _names in _BESIDE.items():
    for _name in _names:
        setattr(Bundle, _name, _Beside(_kind, _name))
