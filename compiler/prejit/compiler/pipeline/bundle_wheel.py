"""A bundle as a Python wheel, which `load("wheel:NAME")` finds where pip has installed it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import tempfile
from pathlib import Path

from prejit.runtime.errors import BuildError, UsageError
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import BUNDLE_NAME
from prejit.runtime.format.referrers import reached
from prejit.runtime.format.root import read_root

_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = {name}
version = {version}
description = {description}
requires-python = ">=3.11"
[tool.hatch.build.targets.wheel]
bypass-selection = true
[tool.hatch.build.targets.wheel.force-include]
{files}
"""


def write_wheel(bundle: str, output: Path, version: str | None = None) -> Path:
    """Write the wheel of a bundle's directory, and return its path.

    It is named after the bundle, `NAME-bundle`, and needs no other package. The same bundle gives the same
    wheel. Its files go from the bundle to the wheel, and nowhere else.

    Raises:
        UsageError: `build` or `hatchling` is not installed, or the version is none.
        BuildError: the wheel cannot be written.
        StoreError, RejectError: the bundle cannot be read.
    """
    if missing := [each for each in ("build", "hatchling") if not importlib.util.find_spec(each)]:
        raise UsageError(
            f"expected the packages build and hatchling, which write wheels, found no {missing[0]}",
            hint="pip install 'prejit[wheel]'",
        )
    from build import BuildBackendException, BuildException, ProjectBuilder
    from packaging.version import InvalidVersion, Version
    from pyproject_hooks import quiet_subprocess_runner

    with Layout(bundle) as layout:
        root = read_root(layout)
        given = root.bundle.annotations[BUNDLE_NAME]
        name = re.sub("[^a-z0-9]+", "-", given.lower()) + "-bundle"
        package = name.replace("-", "_")
        files = {layout.file_path(each): each for each in ("index.json", "oci-layout")}
        for digest in sorted(reached(layout, root)):
            files[layout.blob_path(digest)] = f"blobs/sha256/{digest.removeprefix('sha256:')}"
    try:
        number = str(Version(version or f"0+{root.digest.removeprefix('sha256:')[:12]}"))
    except InvalidVersion as error:
        raise UsageError(
            f"--version: expected a version such as 1.2.0, found {version!r:.80}"
        ) from error
    lines = [
        f"{json.dumps(str(Path(path).absolute()))} = {json.dumps(f'{package}/{each}')}"
        for path, each in files.items()
    ]
    project = _PROJECT.format(
        name=json.dumps(name),
        version=json.dumps(number),
        description=json.dumps(f"The bundle {given} of prejit, {root.digest}"),
        files="\n".join(lines),
    )
    with tempfile.TemporaryDirectory(prefix="prejit-wheel-") as directory:
        (Path(directory) / "pyproject.toml").write_text(project, encoding="utf-8")
        builder = ProjectBuilder(directory, runner=quiet_subprocess_runner)
        try:
            output.mkdir(parents=True, exist_ok=True)
            # On a full disk the backend leaves the half of a wheel under the name of a whole one.
            with tempfile.TemporaryDirectory(prefix=".prejit-wheel-", dir=output) as beside:
                built = Path(builder.build("wheel", beside))
                return built.replace(output / built.name)
        except (BuildBackendException, BuildException, OSError) as error:
            cause = error.__context__
            said = cause.output if isinstance(cause, subprocess.CalledProcessError) else b""
            why = (error.strerror if isinstance(error, OSError) else "") or error
            last = said.decode(errors="replace").strip().rpartition("\n")[2] if said else why
            raise BuildError(
                f"{output}: cannot write the wheel of {bundle}: {last}",
                hint="give another directory: -o DIR" if isinstance(error, OSError) else None,
            ) from error
