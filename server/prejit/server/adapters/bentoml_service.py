"""A bundle as a service of BentoML, which answers what `prejit serve` answers.

# service.py, for `bentoml serve service:bundle`
from prejit.server.adapters.bentoml_service import make_bento_service

bundle = make_bento_service("/bundles/demo")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prejit.server.adapters.hosted_bundle import OnMismatch, load_models, make_bundle_app

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


def make_bento_service(
    path: str,
    *,
    name: str | None = None,
    slots: int | None = None,
    on_mismatch: OnMismatch = "jit",
    **service: Any,
) -> Any:
    """Return a service for `bentoml serve`. Each of its workers loads the bundle.

    Args:
        path: the directory of the bundle, or a reference such as `oci://HOST/REPOSITORY:TAG`.
        name: as of `load_models`.
        slots: as of `load_models`.
        on_mismatch: as of `load`.
        **service: options of `bentoml.service`, such as `workers`, `resources` and `traffic`.
    """
    import bentoml

    app = _AppOfWorker()

    class PrejitBundle:
        def __init__(self) -> None:  # in the worker
            models = load_models(path, name=name, slots=slots, on_mismatch=on_mismatch)
            app.loaded = make_bundle_app(models)

    return bentoml.asgi_app(app)(bentoml.service(PrejitBundle, **service))


class _AppOfWorker:
    """An application that BentoML mounts before a worker has loaded the bundle."""

    loaded: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.loaded(scope, receive, send)
