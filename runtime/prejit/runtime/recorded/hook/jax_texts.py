"""The texts of jax that prejit reads and that jax does not promise: messages, events, names of ingredients.

A test compares each with the installed jax. If a release changes one, programs still run, and reports lack
what this text would have said.
"""

from __future__ import annotations

from typing import Any

KEY_LOGGER = "jax._src.cache_key"
INGREDIENT = "get_cache_key hash of serialized %s: %s"
"""Arguments: the name of an ingredient of a cache key, and its digest."""
FLAG = "Including XLA flag in cache key: %s"

COMPILER_LOGGER = "jax._src.compiler"
HIT = "Persistent compilation cache hit for '%s' with key %r"
MISS = "PERSISTENT COMPILATION CACHE MISS for '%s' with key %r"
"""Logged before the program is compiled. Arguments as of HIT: the program's name and its key."""
NOT_WRITTEN = "Not writing persistent cache entry"
"""The beginning of the messages that a compiled program is not kept."""
TOO_QUICK = "because it took <"
"""Part of such a message if the reason is a setting of `prejit run`."""

SHAPES_LOGGER = "jax._src.interpreters.pxla"
SHAPES = "Compiling %s with global shapes and types %s. Argument mapping: %s."
"""Arguments: the program's name as `jit(score)`, its arguments' avals, their shardings."""

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""A scalar before a program is compiled or read from the cache, a duration after it; both with `fun_name`."""
TRACING_EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
)
"""Durations of tracing and of lowering. A trace inside another reports before that one."""
REQUEST_EVENT = "/jax/compilation_cache/compile_requests_use_cache"
HIT_EVENT = "/jax/compilation_cache/cache_hits"
SAVED_EVENT = "/jax/compilation_cache/compile_time_saved_sec"

CALL_FRAME = "cache_miss"
"""The name of jax's function that traces and compiles for a call of a jitted function."""
PART_FRAME = "call_impl_cache_miss"
"""The name of the one that lowers and compiles what jax has traced outside all traces."""
CALL_LOCALS = ("fun", "jit_info", "args", "kwargs")
"""Its variables: the function, what jax.jit was given with it, and the arguments of the call."""

FILE_SUFFIX = "-cache"
"""What a file of the cache has behind its key."""
OURS_PREFIX = "prejit_"
"""The beginning of the names of prejit's own files, which lie among those of the cache."""
CALLS_PREFIX = OURS_PREFIX + "calls-"
LEAN_PREFIX = OURS_PREFIX + "lean-"
"""Before the key of a program that calls without a trace run: its executable, without what no load needs."""

COMPUTATION = "computation"
JAXLIB = "jax_lib version"
BACKEND = "backend version"
XLA_FLAGS = "XLA flags"
COMPILE_OPTIONS = "compile_options"
ACCELERATOR = "accelerator_config"
COMPRESSION = "compression"
CUSTOM_HOOK = "custom_hook"
INGREDIENTS = (
    *(COMPUTATION, JAXLIB, BACKEND, XLA_FLAGS, COMPILE_OPTIONS),
    *(ACCELERATOR, COMPRESSION, CUSTOM_HOOK),
)
"""The ingredients of a cache key, in jax's order."""


def devices_text(devices: Any) -> str:
    """Return the devices of a program, and how many its process has."""
    ids = [device.id for device in devices.flat]
    return f"devices {ids} of {len(devices.flat[0].client.devices())}"
