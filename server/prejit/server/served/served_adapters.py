"""The adapters of served bundles: their names in requests, and loading and dropping them while others run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.errors import PrejitError, UsageError
from prejit.server.served.served import ModelNotFoundError, Models, Served

if TYPE_CHECKING:
    from prejit.runtime.bundle import Bundle
    from prejit.runtime.lora.adapter_slots import Adapter


def adapters_of(bundle: Bundle) -> dict[str, Adapter]:
    """Return the adapters that a bundle has loaded, by name."""
    if bundle.config.decoder is None or bundle.config.decoder.adapters is None:
        return {}
    return bundle.adapters.loaded


def adapted_model(models: Models, name: str) -> Served:
    """Return the model of a name in a request, with the adapter if it is `MODEL:ADAPTER`.

    An adapter's own name is enough where no model has it, and one model alone has such an adapter.

    Raises:
        ModelNotFoundError: there is no such model, or it has no such adapter.
    """
    served = {each.name: each for each in models}
    if name in served:
        return models.get(name)
    base, _, adapter = name.partition(":")
    if base in served:
        found = models.get(base)
        if adapter in (loaded := adapters_of(found.bundle)):
            return replace(found, name=name, adapter=adapter)
        known = ", ".join(f"{base}:{each}" for each in loaded) or "none"
        raise ModelNotFoundError(
            f"model: expected an adapter that {base} has loaded ({known}), found {name!r:.200}"
            + did_you_mean(adapter, loaded)
        )
    having = [each for each in models if name in adapters_of(each.bundle)]
    if len(having) == 1 and name in adapters_of((one := models.get(having[0].name)).bundle):
        return replace(one, name=name, adapter=name)
    return models.get(name)  # which says what there is


def carry(before: Served, after: Served) -> None:
    """Give the adapters of a bundle to the one that takes its place, from where they were read.

    Adapters that only the new one has are unloaded: they were dropped after an earlier call.

    Raises:
        UsageError: the new one takes none, or the files of one have changed since.
        CheckpointError, UntrustedError: one does not fit it, or must not be loaded.
    """
    serving = adapters_of(before.bundle)
    if serving and after.bundle.config.decoder is None:
        raise UsageError(
            f"{after.name}: expected a bundle that takes adapters, found {after.bundle.name}",
            hint="unload the adapters first, or serve this bundle under another name",
        )
    for name, adapter in adapters_of(after.bundle).items():
        if name not in serving or serving[name].digest != adapter.digest:
            after.bundle.adapters.unload(name)
    for adapter in adapters_of(before.bundle).values():
        found = after.bundle.adapters.load(adapter.name, adapter.path)
        if found.digest != adapter.digest:
            raise UsageError(
                f"{adapter.path}: expected {adapter.digest:.19}, which {before.name}:{adapter.name} serves; "
                f"found {found.digest:.19}",
                hint="put its files back, or unload the adapter and load it again after the swap",
            )


def check_name(name: str, models: Iterable[str]) -> None:
    """Check that no model has the name of an adapter: requests that give it would go to the model.

    Raises:
        UsageError: one has it.
    """
    if name in models:
        raise UsageError(
            f"adapter: expected a name that no model has, found {name!r}", hint="give another name"
        )


def load_adapter(each: list[Served], name: str, path: str) -> Adapter:
    """Load an adapter into a model, and into the release that answers a share of its requests, or into none.

    Raises:
        UsageError: the bundle takes none, the name is taken, no slot is free, or the release refuses it.
        CheckpointError, UntrustedError: it does not fit, or must not be loaded.
    """
    is_new = name not in adapters_of(each[0].bundle)
    found = each[0].bundle.adapters.load(name, path)
    for served in each[1:]:
        try:
            served.bundle.adapters.load(name, path)
        except PrejitError as error:
            if is_new:
                each[0].bundle.adapters.unload(name)
            raise UsageError(
                f"adapter {name!r}: expected one that the release {served.path}, which a canary tries, takes "
                f"too: {error}",
                hint='end the canary first: POST /canary {"action": "abort"}',
            ) from error
    return found
