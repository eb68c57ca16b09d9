"""Note the files that libraries open by native code. Python raises no audit event for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from operator import attrgetter
from typing import Any, final

_READERS: Mapping[str, Sequence[str]] = {
    "safetensors": ("safe_open",),
    "safetensors.numpy": ("safe_open",),
    "safetensors.torch": ("safe_open",),
    "h5py": ("File.__init__",),
    "tokenizers": ("Tokenizer.from_file",),
    "pyarrow": ("memory_map", "OSFile", "input_stream"),
    "pyarrow.parquet": ("ParquetFile.__init__", "read_table"),
    "pyarrow.feather": ("read_table", "read_feather"),
    "pyarrow.csv": ("read_csv", "open_csv"),
    "pyarrow.dataset": ("dataset",),
    "tensorstore": ("open", "KvStore.open"),
}
"""The functions and methods by which libraries open files, by module."""


@final
class NativeReaders:
    """Wrappers around the functions of `_READERS`, where their modules are imported."""

    def __init__(self, note: Callable[[str, Any], object]) -> None:
        """Wrap nothing yet.

        Args:
            note: called with the name of a function and the path that it opens; None: the path is not known.
        """
        self._note = note
        self._wrapped: dict[tuple[str, str], tuple[Any, str, Any]] = {}

    def wrap(self) -> None:
        """Wrap the functions of all modules that are imported by now."""
        for module in _READERS.keys() & sys.modules.keys():
            for name in _READERS[module]:
                if (module, name) not in self._wrapped:
                    self._wrap(module, name)

    def unwrap(self) -> None:
        """Put the functions back."""
        for owner, attribute, before in self._wrapped.values():
            setattr(owner, attribute, before)
        self._wrapped.clear()

    def _wrap(self, module: str, name: str) -> None:
        *inside, attribute = name.split(".")
        try:
            owner = (
                attrgetter(".".join(inside))(sys.modules[module]) if inside else sys.modules[module]
            )
            before = vars(owner)[attribute]
            call: Any = getattr(owner, attribute)
        except (AttributeError, KeyError):  # another version, or its import has not ended
            return
        label, note = f"{module}.{name.removesuffix('.__init__')}", self._note

        @wraps(call)
        def read(*args: Any, **options: Any) -> Any:
            given = (*args, *options.values())
            path = next((each for each in given if isinstance(each, str | os.PathLike)), None)
            if path is not None or module == "tensorstore":  # else it reads an open file
                note(label, path)
            return call(*args, **options)

        setattr(owner, attribute, staticmethod(read) if isinstance(before, staticmethod) else read)
        self._wrapped[module, name] = (owner, attribute, before)
