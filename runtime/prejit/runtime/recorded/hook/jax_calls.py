"""The parts of jax by which a call runs without a trace: private, and alike in jax 0.10 to 0.12.

jaxlib calls `cache_miss` in jax._src.pjit for a call whose executable it does not know. That asks
`_infer_params` for the traced function, has `_run_python_pjit` lower, compile and run it, and tells jaxlib by
`_get_fastpath_data` how to run it again. What a `grad` or `vmap` outside jax.jit makes of a jitted function
is a jaxpr, which `_pjit_call_impl_python` lowers, compiles and runs. `hook_calls` stands before these four.

The signature of a call tells it apart from others of the process: function, structure and types of arguments,
settings of jax.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from prejit.runtime.recorded.hook.jax_texts import CALL_FRAME, LEAN_PREFIX, PART_FRAME, devices_text
from prejit.runtime.recorded.hook.jaxpr_texts import jaxpr_text, value_text
from prejit.runtime.recorded.hook.kept_shardings import (
    axes_of,
    axis_types,
    sharding_json,
    sharding_of,
)
from prejit.runtime.recorded.hook.plain_texts import digest_of, jit_text, text_of

Json = Any


@dataclass(frozen=True)
class TracedPart:
    """A jaxpr that jax has made of a jitted function inside a `grad` or `vmap` outside jax.jit.

    Attributes:
        name: of its program.
        jaxpr: what jax lowers.
        options: what it lowers with it: shardings, layouts, donated arguments.
    """

    name: str
    jaxpr: Any
    options: dict[str, Any]

    def texts(self) -> tuple[str, str]:
        """Return the exact texts of the jaxpr and of the options.

        Raises:
            NotKeptError: one of them has none.
        """
        return f"{self.name} {jaxpr_text(self.jaxpr)}", value_text(self.options)


@dataclass(frozen=True)
class JaxCall:
    """A call for which jaxlib has no executable, of a jitted function or of a part of a transformed one.

    Attributes:
        function: what was given to jax.jit, or a TracedPart.
        info: the other arguments of jax.jit, as jax keeps them; None with a TracedPart.
        structures: jax's tree of each argument that is not static, in the order of the call.
        names: the names of the last of them, which the call gave by name.
        static: the values of the static arguments, those by name last.
        static_names: their names.
        arrays: the leaves of `structures`.
        avals: their types.
    """

    function: Any
    info: Any
    structures: tuple[Any, ...]
    names: tuple[str, ...]
    static: tuple[Any, ...]
    static_names: tuple[str, ...]
    arrays: list[Any]
    avals: tuple[Any, ...]


@dataclass(frozen=True)
class KeptCall:
    """What runs a call without a trace: jax's MeshExecutable, and the tree of its results."""

    executable: Any
    tree: Any


@dataclass(frozen=True)
class CompiledCall:
    """The result of jax for a call that it traced.

    Attributes:
        executable: its MeshExecutable.
        is_dispatched: whether jaxlib runs it again by itself.
        tree: the tree of its results.
        arrays: the number of arrays that it was called with: those of the call, and those of the trace.
    """

    executable: Any
    is_dispatched: bool
    tree: Any
    arrays: int


Started = Callable[[object, JaxCall], KeptCall | None]
"""Is called with each call and a token of it. Returns what runs it; None: jax traces."""
Traced = Callable[[object], None]
"""Is called with the token of a call when jax has traced it."""
Ended = Callable[[object, CompiledCall], None]
"""Is called with the token of a call that jax traced, compiled and ran."""


def hook_calls(started: Started, traced: Traced | None = None, ended: Ended | None = None) -> None:
    """Call `started` for calls outside all traces that have no executable, the others when jax has made one.

    For a TracedPart `traced` is not called.

    Raises:
        AttributeError, ImportError: this jax has other parts.
    """
    from jax._src import core, dispatch, pjit, source_info_util, traceback_util, tree_util
    from jax._src.lib import jax_jit

    traceback_util.register_exclusion(__file__)  # its frames tell nobody of the program's error
    source_info_util.register_exclusion(__file__)  # nor of the lines that jax names in its own

    infer, run, path = pjit._infer_params, pjit._run_python_pjit, pjit._get_fastpath_data
    run_part = pjit._pjit_call_impl_python

    def described(function: Any, info: Any, args: Any, kwargs: Any) -> JaxCall:
        found, arrays = jax_jit.parse_arguments(
            *(args, tuple(kwargs.values()), tuple(kwargs), info.static_argnums),
            *(info.static_argnames, tree_util.tracing_registry),
        )
        avals = tuple(map(core.shaped_abstractify, arrays))
        return JaxCall(
            *(function, info, tuple(found.dynamic_arg_treedefs), tuple(found.dynamic_arg_names)),
            *(tuple(found.static_args), tuple(found.static_arg_names), list(arrays), avals),
        )

    def infer_params(function: Any, info: Any, args: Any, kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if frame.f_code.co_name == CALL_FRAME and core.trace_state_clean():
            try:
                call = described(function, info, args, kwargs)
            except Exception:  # jax says below what is wrong with the arguments
                call = None
            if call is None:
                return infer(function, info, args, kwargs)
            kept = started(frame, call)
            if kept is not None:
                return kept, call.arrays
            found = infer(function, info, args, kwargs)
            if traced is not None:
                traced(frame)
            return found
        return infer(function, info, args, kwargs)

    def run_python_pjit(found: Any, arrays: Any, function: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(found, KeptCall):
            return run(found, arrays, function, args, kwargs)
        for array in arrays:
            dispatch.check_arg(array)
        arrays = [core.full_lower(array) for array in arrays]
        results = found.executable.unsafe_call(*arrays)
        nested = tree_util.tree_unflatten(found.tree, results)
        return nested, results, found.tree, arrays, _NOTHING, found.executable, None, []

    def fastpath_data(executable: Any, tree: Any, arrays: Any, *rest: Any) -> Any:
        data = path(executable, tree, arrays, *rest)
        if ended is not None:
            count = len(arrays) + len(rest[-1])
            ended(sys._getframe(1), CompiledCall(executable, data is not None, tree, count))
        return data

    def call_impl_python(*arrays: Any, jaxpr: Any, name: str, **options: Any) -> Any:
        frame, avals = sys._getframe(1), jaxpr.in_avals
        if frame.f_code.co_name == PART_FRAME and core.trace_state_clean():
            part = TracedPart(name, jaxpr, options)
            kept = started(frame, JaxCall(part, None, (), (), (), (), list(arrays), tuple(avals)))
            if kept is not None:
                return kept.executable.unsafe_call(*arrays), kept.executable, None, []
        return run_part(*arrays, jaxpr=jaxpr, name=name, **options)

    pjit._infer_params = infer_params
    pjit._pjit_call_impl_python = call_impl_python
    pjit._run_python_pjit = run_python_pjit
    pjit._get_fastpath_data = fastpath_data


def hash_machine(recorded: Mapping[str, str]) -> None:
    """Have jax hash other machines' devices into its keys: hexadecimal, by the text of devices here."""
    from jax._src import cache_key

    own = cache_key._hash_accelerator_config

    def hash_config(to: Any, devices: Any) -> None:
        found = recorded.get(devices_text(devices))
        own(to, devices) if found is None else to.update(bytes.fromhex(found))

    cache_key._hash_accelerator_config = hash_config


class _Client:
    """A client of jaxlib that also gives an executable of the cache the functions that it calls."""

    def __init__(self, client: Any, callbacks: Any) -> None:
        self._client = client
        self._callbacks = callbacks
        # A part of jax's key: a process without this hook must not find what it cannot run.
        self.platform_version = f"{client.platform_version} callbacks"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def deserialize_executable(self, *arguments: Any) -> Any:
        return self._client.deserialize_executable(*arguments, self._callbacks)


def keep_callbacks() -> None:
    """Let jax's cache keep programs that call Python, as jax does from 0.11 on.

    The functions are those of this process's own trace, whether jax compiles the executable or reads it.
    """
    from jax._src import compiler
    from jax._src.lib import xla_client

    compiled, write = compiler.compile_or_get_cached, compiler._cache_write

    def compile_or_get_cached(client: Any, *rest: Any) -> Any:
        callbacks = rest[3]
        # Other clients only compile, and the functions of a TPU are channels.
        if callbacks and type(client) is xla_client.Client and all(map(callable, callbacks)):
            client = _Client(client, callbacks)
        return compiled(client, *rest)

    def cache_write(*arguments: Any) -> None:
        write(*arguments[:-1], not isinstance(arguments[3], _Client) and arguments[-1])

    compiler.compile_or_get_cached = compile_or_get_cached
    compiler._cache_write = cache_write


_NOTHING = SimpleNamespace(effects=frozenset(), consts=[])
"""Stands for the jaxpr of a call without a trace where jax looks for its effects and constants."""


def settings_text(left_out: Sequence[str]) -> tuple[Any, ...]:
    """Return jax's settings of this thread, to be compared within the process."""
    from jax._src import config

    values = tuple(
        (name, value) for name, value in config.config.values.items() if name not in left_out
    )
    # The axes have no text. An outermost call is inside none.
    return values, config.trace_context()[:-1], config.debug_nans.value, config.debug_infs.value


def looks_for_nans() -> bool:
    """Return whether jax looks for NaNs or infinities: it runs such a call by its trace again."""
    from jax._src import config

    return bool(config.debug_nans.value or config.debug_infs.value)


def array_text(array: Any, aval: Any) -> str:
    """Return the type of an argument, and where it lies."""
    text = (
        f"{aval.str_short(short_dtypes=False)}{' weak' * bool(getattr(aval, 'weak_type', False))}"
    )
    if not hasattr(array, "_committed"):
        return text
    if not array._committed:
        return f"{text} uncommitted"
    plain = getattr(array, "_base_array", array)  # of random keys, which have no layout
    return f"{text} {sharding_json(array.sharding)} {plain.format.layout}"


def load_executable(described: Json, key: str) -> Any:
    """Return the MeshExecutable that `executable_json` described, with the code of jax's cache.

    Raises:
        Exception: any of jax, if it has no such device or file.
    """
    import jax
    from jax._src import compilation_cache
    from jax._src.interpreters import pxla
    from jax._src.lib import xla_client

    devices = {device.id: device for device in jax.devices(described["platform"])}
    chosen = xla_client.DeviceList(tuple(devices[id_] for id_ in described["devices"]))
    client = chosen[0].client
    cache = compilation_cache._get_cache(client)
    content = cache.get(LEAN_PREFIX + key) or cache.get(key)
    content = compilation_cache.decompress_executable(content)
    serialized, _ = compilation_cache.extract_executable_and_time(content)
    if b"lapack_" in serialized:  # jax loads SciPy's LAPACK when it lowers a call of it
        from jax._src.lib import lapack

        lapack._lapack.initialize()
    inputs = [aval_of(each) for each in described["inputs"]]
    nothing = [None] * len(inputs)
    outputs = [aval_of(each) for each in described["outputs"]]
    return pxla.UnloadedMeshExecutable(
        xla_executable=client.deserialize_executable(serialized, executable_devices=chosen),
        device_list=chosen,
        backend=client,
        input_avals=inputs,
        input_shardings=[_sharding(each, devices) for each in described["input_shardings"]],
        output_avals=outputs,
        output_shardings=[_sharding(each, devices) for each in described["output_shardings"]],
        committed=described["committed"],
        name=described["name"],
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(described["kept"]),
        mut=None,
        xla_in_layouts=nothing,
        dispatch_in_layouts=nothing,
        xla_out_layouts=[None] * len(outputs),
        all_args_info=None,
        pgle_profiler=None,
    ).load()


def aval_of(described: Json) -> Any:
    """Return the type of an argument or a result that was described."""
    import jax.numpy as jnp
    from jax._src import core
    from jax._src.mesh import AbstractDevice
    from jax._src.random import prng
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    name, shape, kind, *on_mesh = described
    dtype = prng.KeyTy(prng.prngs[name]) if kind == "key" else jnp.dtype(name)
    sharding = None
    if on_mesh:
        ((names, sizes, types, device, entries),) = on_mesh
        mesh = AbstractMesh(
            tuple(sizes),
            tuple(names),
            axis_types=axis_types(types),
            abstract_device=device and AbstractDevice(*device),
        )
        sharding = NamedSharding(mesh, PartitionSpec(*map(axes_of, entries)))
    return core.ShapedArray(tuple(shape), dtype, weak_type=kind == "weak", sharding=sharding)


def _sharding(described: Json, devices: dict[int, Any]) -> Any:
    if described[0] != "everywhere":
        return sharding_of(described, devices)
    from jax._src.sharding_impls import GSPMDSharding

    chosen = tuple(devices[id_] for id_ in described[1])
    return GSPMDSharding.get_replicated(chosen, memory_kind=described[2])


def structure_of(class_: Any, beside: Any, children: Sequence[Any]) -> Any:
    """Return jax's structure of an object of a registered class, with a value beside these children.

    jaxlib, up to 0.12 at least, takes a class of named tuples for a plain one, although it is registered: it
    loses the value, and gives the children to the fields in order. So the class's own function makes those.

    Raises:
        ValueError: that function makes another structure of placeholders.
        Exception: of that function.
    """
    from jax._src.tree_util import _registry as registered
    from jax.tree_util import PyTreeDef, default_registry

    if not _is_registered_tuple(class_):
        return PyTreeDef.from_node_data_and_children(default_registry, (class_, beside), children)
    parts = [child.unflatten([object() for _ in range(child.num_leaves)]) for child in children]
    found = default_registry.flatten(registered[class_].from_iter(beside, parts))[1]
    if found.node_data() != (class_, beside) or found.children() != [*children]:
        raise ValueError(f"{class_.__qualname__}: expected {children}, found {found}")
    return found


def _is_registered_tuple(class_: Any) -> bool:
    """Return whether a class of named tuples is registered with jax, which plain ones are not."""
    from jax._src.tree_util import _registry as registered

    is_named = isinstance(class_, type) and issubclass(class_, tuple) and hasattr(class_, "_fields")
    return is_named and class_ in registered


PARTS = ("function", "jit", "structure", "arguments", "static", "settings")
"""The parts of a signature, in the order in which a difference is looked for."""


class SignatureReader:
    """Reads the signatures of calls.

    Args:
        left_out: settings of jax that tell nothing of a program.
    """

    def __init__(self, left_out: tuple[str, ...]) -> None:
        self._left_out = left_out
        self._settings: tuple[Any, str] = (None, "")

    def read(self, call: JaxCall) -> dict[str, str]:
        """Return a text for each of PARTS.

        Raises:
            NotKeptError: an argument has a sharding that is not kept, or a jaxpr has no exact text.
        """
        arrays = zip(call.arrays, call.avals, strict=True)
        statics = (call.static, call.static_names)
        if isinstance(call.function, TracedPart):
            function, jit = call.function.texts()
        else:
            function, jit = text_of(call.function), jit_text(call.info)
        return {
            "function": function,
            "jit": jit,
            "structure": "; ".join([*map(_tree_text, call.structures), ", ".join(call.names)]),
            "arguments": ", ".join(array_text(array, aval) for array, aval in arrays),
            "static": text_of(statics),
            "settings": self._settings_text(),
        }

    def _settings_text(self) -> str:
        found = settings_text(self._left_out)
        known, text = self._settings
        if found != known:
            text = text_of(found)
            self._settings = found, text
        return text


def signature_of(parts: dict[str, str]) -> str:
    """Return a digest of all parts."""
    return digest_of("\0".join(parts[name] for name in PARTS))


def _tree_text(tree: Any) -> str:
    data = tree.node_data()
    if data is None:
        return "*"
    kind, beside = data
    children = ",".join(map(_tree_text, tree.children()))
    name = kind.__name__ if kind.__module__ == "builtins" else text_of(kind)
    return f"{name}({'' if beside is None else text_of(beside)}|{children})"
