"""The inputs of a process that a recording of calls depends on, and their comparison.

They are the command, the files that were read, the directories that were listed, the environment variables
that were read, and the modules that were imported. `process_watch` of the compiler's hook collects them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prejit.runtime.recorded.hook.input_facts import (
    FILES_OF_MEMORY,
    LISTED,
    counted_names,
    file_of,
    identity_and_device,
    initial_environment,
    is_of_library,
    kind_of,
    link_of,
    listing_digest,
    memory_devices,
    order_digest,
    packages_digest,
)
from prejit.runtime.recorded.hook.jax_texts import CALLS_PREFIX, FILE_SUFFIX

_READ: dict[str, tuple[Callable[[str], Any], str]] = {
    "listings": (listing_digest, "the names in the directory {}"),
    "orders": (order_digest, "the names in the directory {}, or their order,"),
    "packages": (packages_digest, "the installed packages in {}"),
    "kinds": (kind_of, "whether {} is a file or a directory"),
    "links": (link_of, "where the link {} leads"),
}
INPUT_KINDS = ("variables", "files", *_READ, "absent")
"""The kinds of inputs that are noted in the order in which they are read."""

_OF_TOOLS = ("prejit", "sitecustomize", "usercustomize")
"""Modules that tell nothing of a program. Profilers and tracers bring a sitecustomize of their own."""


def command_of_process() -> list[str]:
    """Return what tells this process from others of a program: its directory and its command.

    Processes of `multiprocessing` have the arguments of the program, which are not in their own command.
    """
    command, arguments = sys.orig_argv[1:], sys.argv[1:]
    is_started_so = command[len(command) - len(arguments) :] == arguments
    return [os.getcwd(), *command, *([] if is_started_so else sys.argv)]


def calls_file(command: list[str]) -> str:
    """Return the name of the file with the calls of a process."""
    text = "\0".join(command).encode(errors="surrogatepass")
    return f"{CALLS_PREFIX}{hashlib.sha256(text).hexdigest()}{FILE_SUFFIX}"


def file_digest(path: str) -> str | None:
    """Return a digest of a file's content; None: it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError:
        return None


class InputComparison:
    """Compares the inputs of this process with recorded ones, as far as a call needs them.

    Args:
        inputs: as `recording.untraced_calls` of the compiler writes them: "environment" has values by name,
            "variables" [name, index of the first call after it was read, value then, or the names where code
            LISTED variables], "files" [path, index, identity, digest], "listings", "orders" (listings in
            traces, with the system's order of names) and "packages" [path, index, digest], "kinds" [path,
            index, kind], "links" [path, index, where it leads] and "absent" [name of a module, index, None],
            each in the order of the index, "modules" the files of all imported modules by name, "prefix"
            `sys.prefix`.
        receipts: where this user keeps identities and digests of files that are equal although these differ.
    """

    def __init__(self, inputs: Mapping[str, Any], receipts: Path) -> None:
        self._inputs = inputs
        self._receipts = receipts
        self._compared = dict.fromkeys(INPUT_KINDS, 0)
        self._environment_is_equal = False
        self._modules: dict[str, str | None] = inputs["modules"]
        self._module_count = 0
        self._known: dict[str, list[Any]] | None = None
        self._is_new = False
        self._memory = memory_devices()

    def difference(self, index: int) -> str | None:
        """Return what differs of the inputs that the call with this index came after; None: nothing does."""
        if not self._environment_is_equal:
            if sys.prefix != self._inputs["prefix"]:
                return f"the environment of Python, {sys.prefix},"
            found = initial_environment()
            expected = self._inputs["environment"]
            for name in sorted({*expected, *filter(is_of_library, found)}):
                if found.get(name) != expected.get(name):
                    return f"the environment variable {name}"
            self._environment_is_equal = True
        if len(sys.modules) != self._module_count:
            for name, module in [*sys.modules.items()]:
                if name.startswith(_OF_TOOLS):
                    continue
                if name not in self._modules:
                    return f"the imported module {name}, which was not recorded,"
                if file_of(module) != self._modules[name]:
                    return f"the imported module {name}, from {file_of(module)},"
            self._module_count = len(sys.modules)
        for name, value in self._until("variables", index):
            if name.endswith(LISTED):
                if others := sorted({*value} ^ {*counted_names(name[:-1])}):
                    return f"the environment variable {others[0]}"
            elif os.environ.get(name) != value:
                return f"the environment variable {name}"
        for path, identity, digest in self._until("files", index):
            if not self._is_equal(path, identity, digest):
                return f"the file {path}"
        for kind, (read, what) in _READ.items():
            for path, found_then in self._until(kind, index):
                if read(path) != found_then:
                    return what.format(path)
        for name, _ in self._until("absent", index):
            with contextlib.suppress(ModuleNotFoundError):  # of a parent
                if find_spec(name) is not None:
                    return f"the module {name}, which was not there,"
        return None

    def _until(self, kind: str, index: int) -> list[list[Any]]:
        """Return the recorded inputs of a kind that no call before needed, without their index."""
        entries = self._inputs[kind]
        start = end = self._compared[kind]
        while end < len(entries) and entries[end][1] <= index:
            end += 1
        self._compared[kind] = end
        return [[each[0], *each[2:]] for each in entries[start:end]]

    def _is_equal(self, path: str, identity: list[int] | None, digest: str | None) -> bool:
        found, device = identity_and_device(path)
        if found is None or identity is None:
            return found == identity
        # A process that has mapped a file in memory writes there without a change of times.
        in_memory = device in self._memory or path.startswith(FILES_OF_MEMORY)
        if not in_memory and (found == identity or self._receipt(path) == [found, digest]):
            return True
        if found[0] != identity[0] or digest is None or file_digest(path) != digest:
            return False
        if in_memory:
            return True
        assert self._known is not None
        self._known[path] = [found, digest]
        self._is_new = True
        return True

    def _receipt(self, path: str) -> list[Any] | None:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError, ValueError):
                self._known = json.loads(self._receipts.read_text())
        return self._known.get(path)

    def save(self) -> None:
        """Keep the identities of files that were read and found equal, for the next start."""
        if self._is_new:
            self._is_new = False
            part = self._receipts.with_name(f"{self._receipts.name}.{os.getpid()}")
            with contextlib.suppress(OSError):
                part.parent.mkdir(mode=0o700, exist_ok=True)
                part.write_text(json.dumps(self._known))
                part.replace(self._receipts)
