"""Five modules touch what jax and jaxlib do not promise.

The import rules of `make lint` see other distributions as a whole: for them `jax._src` is `jax`.
"""

import pytest

from scripts.changed_tests import REPOSITORY, ROOTS, imported_names

PRIVATE = ("jax._src", "jaxlib")
FILES = {
    f"{root}.{'.'.join(path.relative_to(REPOSITORY / home).with_suffix('').parts)}": path
    for root, home in ROOTS.items()
    for path in sorted((REPOSITORY / home).rglob("*.py"))
}
ALLOWED = {
    *(f"prejit.runtime.device.{name}" for name in ("_jax_parts", "_jaxlib", "_jit_dispatch")),
    "prejit.runtime.recorded.hook.jax_calls",
    "prejit.compiler.recording.hook.jax_lowerings",
}
"""The last two run in programs whose Python has no prejit, so they cannot lie beside the others."""
PUBLIC = "jaxlib.version"
"""A file of constants that `pip show jaxlib` could give as well."""


def private_imports(source):
    found = {n for n in imported_names(source) for p in PRIVATE if f"{n}.".startswith(f"{p}.")}
    return {name for name in found if not f"{name}.".startswith(f"{PUBLIC}.")}


def test_private_parts_of_jax_stay_in_five_modules():
    found = {
        module: names
        for module, path in FILES.items()
        if (names := private_imports(path.read_text(encoding="utf-8")))
    }
    assert found.keys() == ALLOWED
    assert REPOSITORY / ROOTS["prejit.compiler"] / "api.py" in FILES.values()
    assert len(FILES) > 150


@pytest.mark.parametrize(
    "source",
    [
        "from jaxlib import xla_client",
        "import jaxlib.mlir.ir as ir",
        "def f():\n    from jax._src import config",
        "from jax import _src",
        "if TYPE_CHECKING:\n    from jax._src.mesh import Mesh",
        "import importlib\nimportlib.import_module('jaxlib.mlir')",
    ],
)
def test_every_way_to_import_a_private_part_is_seen(source):
    assert private_imports(source)
    assert not private_imports("import jax\nfrom jaxlib import version\nimport jax.export")
