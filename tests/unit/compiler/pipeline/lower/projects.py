"""Code of the user that is traced in a directory of its own, as a build does it."""

import io
from functools import cache, partial

import numpy as np
from safetensors.numpy import save

from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.pipeline.executable_jobs import planned_executables
from prejit.compiler.pipeline.lower.program_lowering import lower
from prejit.compiler.pipeline.lower.trace_keeping import remember
from prejit.compiler.pipeline.plan import PlanOptions, plan_build
from prejit.compiler.pipeline.workspace import Workspace, find_code
from prejit.compiler.progress import Quiet
from prejit.compiler.store.directory_store import DirectoryStore


class Project:
    """A manifest with modules beside it, and a store."""

    def __init__(self, directory, functions, files=None, **modules):
        """Write it. A function's value is `module:attribute`, and more lines of its section.

        `files` are contents by name below the directory.
        """
        self.directory = directory
        self.write_manifest(functions)
        sources = {f"{name}.py": content for name, content in modules.items()}
        for name, content in {**(files or {}), **sources}.items():
            self.write(name, content)
        self.notes = []
        self.find_code = find_code
        self.store = DirectoryStore.open(directory.parent / "cache")
        self.lowered = {}

    def write_manifest(self, functions, more_tables=""):
        sections = []
        for name, text in functions.items():
            at, _, more = text.partition("\n")
            args = "" if "args" in more else 'args = { x = "float32[3]" }\n'
            sections.append(f'[[program]]\nname = "{name}"\nfunction = "{at}"\n{args}{more}\n')
        target = '[[target]]\nname = "cpu-host"\n'
        self.write("m.toml", f'[bundle]\nname = "m"\n{more_tables}{"".join(sections)}{target}')

    def write(self, name, content):
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    def trace(self, *, retrace=False):
        """Do what a build does before it compiles, and return the names of programs that were traced."""
        options = PlanOptions(retrace=retrace)
        plan = plan_build(read_manifest(self.directory / "m.toml"), self.store, options)
        code = cache(partial(self.find_code, plan.manifest))
        progress = Quiet()
        progress.note = self.notes.append
        space = Workspace(plan, None, code, self.store, progress, None)  # it has no model
        self.lowered = {each.spec.name: lower(space, each) for each in plan.programs}
        remember(space, self.lowered, space.parameters())
        return {each.spec.name for each in plan.programs if each.lowered is None}

    def why(self):
        """Return why the only program is not cached."""
        plan = plan_build(read_manifest(self.directory / "m.toml"), self.store)
        [planned] = planned_executables(plan, self.store)
        return planned.why

    def changed(self):
        """Return whether the only program is traced, and gives another program."""
        [before] = self.lowered.values()
        traced = self.trace()
        [after] = self.lowered.values()
        assert (before.portable == after.portable) == (not traced)
        return bool(traced)


def project(tmp_path, model, more="", **modules):
    """A project of one function that was traced, and that nothing traces again."""
    made = Project(tmp_path / "project", {"p": f"model:f\n{more}"}, model=model, **modules)
    assert made.trace() == {"p"}
    assert made.trace() == set()
    return made


def times(factor, head=""):
    return f"{head}\n\n\ndef f(x):\n    return x * {factor}\n"


SCALED = times("helper.FACTOR", "import helper")
SAME = "def f(x):\n    return x\n"
TWO, THREE = "FACTOR = 2\n", "FACTOR = 3\n"


def numbers(value):
    np.save(written := io.BytesIO(), np.float32(value))
    return written.getvalue()


def tensors(value):
    return save({"w": np.full(3, value, np.float32)})
