"""Watch jax lower programs: keep each for builds for other machines, and note where it calls Python.

All that a recording takes from jax's private parts is here, and in the runtime's `jax_calls`.
`compile/recorded_lowering.py` draws the files.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

from prejit.runtime.recorded.hook.jax_texts import devices_text

ENDING = ".lowered"
"""The ending of such a file, whose name begins with the key that jax computed for the program."""


def keep_programs(directory: str) -> None:
    """Write a file for each program from now on.

    Raises:
        AttributeError, ImportError: this jax has other parts.
    """
    from jax._src import cache_key
    from jax._src.lib import _jax
    from jax._src.lib.mlir.dialects import hlo

    key_of, canonical = cache_key.get, cache_key._canonicalize_ir

    def kept(module: Any, devices: Any, options: Any, backend: Any, *rest: Any, **more: Any) -> str:
        key: str = key_of(module, devices, options, backend, *rest, **more)
        with contextlib.suppress(Exception):  # a build says which programs it lacks
            path = os.path.join(directory, key + ENDING)
            lowered = b"" if os.path.exists(path) else canonical(module, False)
            # Pointers of this process are in a partitioner of the program.
            if lowered and b"CustomSPMDPartitioning" not in lowered:
                version = hlo.get_current_version()
                portable = _jax.mlir.serialize_portable_artifact(lowered, version, True)
                header = _header(cache_key, devices, options, backend)
                unfinished = f"{path}.{os.getpid()}"
                with open(unfinished, "wb") as file:
                    file.write(json.dumps(header).encode() + b"\n" + portable)
                os.replace(unfinished, path)
        return key

    cache_key.get = kept


def hook_callbacks(note: Callable[[Any, list[tuple[str, int]]], None]) -> None:
    """Call `note` when jax lowers a call of Python: with the function, and the frames that asked for it."""
    from jax._src import callback
    from jax._src.lib import xla_client
    from jax._src.source_info_util import user_frames

    emit = callback.emit_python_callback

    def emit_python_callback(context: Any, *arguments: Any, **named: Any) -> Any:
        found = emit(context, *arguments, **named)
        if found[2] is not None:  # on a TPU it is
            now = xla_client.Traceback.get_traceback()  # for what jax traces when it lowers
            frames = [*user_frames(context.traceback), *user_frames(now)]
            note(found[2], [(each.file_name, each.start_line) for each in frames])
        return found

    callback.emit_python_callback = emit_python_callback


def _header(cache_key: Any, devices: Any, options: Any, backend: Any) -> dict[str, Any]:
    hashed = _Hashed()
    cache_key._hash_accelerator_config(hashed, devices)
    return {
        "prejit": 1,
        "platform": backend.platform,
        "devices": devices_text(devices),
        "count": len(backend.devices()),
        "accelerator": hashed.content.hex(),
        "options": base64.b64encode(options.SerializeAsString()).decode(),
    }


class _Hashed:
    """Collects what jax would hash."""

    content = b""

    def update(self, content: bytes) -> None:
        self.content += content
