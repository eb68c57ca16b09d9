"""A bundle as an application of Ray Serve: each replica answers what `prejit serve` answers.

from ray import serve
from prejit.server.adapters.ray_serve_app import make_ray_app

serve.run(make_ray_app("/bundles/demo", num_replicas=2))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prejit.server.adapters.hosted_bundle import OnMismatch, load_models, make_bundle_app

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.applications import Starlette


def make_ray_app(
    path: str,
    *,
    name: str | None = None,
    slots: int | None = None,
    on_mismatch: OnMismatch = "error",
    **deployment: Any,
) -> Application:
    """Return an application for `serve.run`. Each of its replicas loads the bundle on its own node.

    Args:
        path: a directory that all nodes have, or a reference such as `oci://HOST/REPOSITORY:TAG`.
        name: as of `load_models`.
        slots: as of `load_models`.
        on_mismatch: as of `load`. A replica on a node that matches no target fails, unless it is `jit`.
        **deployment: options of Ray's `serve.deployment`, such as `num_replicas`, `max_ongoing_requests` and
            `ray_actor_options`.
    """
    from ray import serve

    def build() -> Starlette:  # runs in the replica: nothing of jax is sent
        models = load_models(path, name=name, slots=slots, on_mismatch=on_mismatch)
        return make_bundle_app(models)

    bundle = serve.deployment(name="PrejitBundle", **deployment)
    return bundle(serve.ingress(build)()).bind()
