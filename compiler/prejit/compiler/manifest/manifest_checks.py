"""Check the values of a manifest.

Every check takes the data as tomllib returns it and passes over values of a wrong type, which `tables`
reports. So one run reports all mistakes of a file.
"""

from __future__ import annotations

import keyword
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from prejit.compiler.base.suggestions import did_you_mean, no_such_path, shown
from prejit.compiler.manifest import section_checks
from prejit.compiler.manifest.manifest import REPEAT, UNCHECKED, names_object
from prejit.compiler.manifest.section_checks import table, wrong
from prejit.compiler.manifest.shape_string import MAX_SIZE, SIZE, split_shape, undefined
from prejit.compiler.manifest.valid_values import (
    CACHE_DTYPES,
    DTYPES,
    MAX_DRAFT,
    SHAPES,
    SIZES,
    STATIC,
    KeyPath,
    expected,
)
from prejit.runtime.format.checks.seldom_parts import HANDLER_NAME
from prejit.runtime.format.limits import MAX_MESH_DEVICES
from prejit.runtime.format.names import ADAPTABLE_KINDS, ADAPTED, DRAFT

Problems = Iterator[tuple[KeyPath, str]]
"""Pairs of a key and what is wrong with it, in the order of the file where that is easy."""

MAX_PROGRAMS = 10_000
"""Largest number of programs of a manifest. Each takes seconds to compile, for every target."""
MAX_ELEMENTS = 2**40
"""Largest number of elements of a function's argument: 4 TiB of float32, more than any machine has."""
BESIDE = (".report.json", ".report.html", ".sig")
"""Endings of the files that are written beside a bundle, with its name before them."""
OWN_NAMES = (
    *("copy", "encode", "images", "image-prefill"),
    *ADAPTABLE_KINDS,
    *(f"{ADAPTED}{kind}" for kind in ADAPTABLE_KINDS),
    *(f"{DRAFT}{kind}" for kind in ("prefill", "decode", "copy")),
)
"""The names of a model's programs, which a [[program]] cannot have."""


def missing(data: dict[str, Any]) -> Problems:
    """Find the sections that a manifest must have and this one lacks."""
    for name in ("bundle", "target"):
        if not data.get(name) and data.get(name) in (None, []):
            yield (name,), f"missing; expected {expected(name)}"
    uses = [name for name in ("generate", "encode") if name in data]
    model = data.get("model")
    if isinstance(model, dict) and not {"source", "module"} & model.keys():
        wanted = f"{expected('model.source')}, or module, which names a decoder of your own"
        yield ("model", "source"), f"missing; expected {wanted}"
    if "model" in data and not uses:
        wanted = f"{expected('generate')} or {expected('encode')}"
        yield ("generate",), f"missing; [model] needs {wanted}"
    if "model" not in data:
        for name in uses:
            yield ("model",), f"missing; [{name}] needs {expected('model')}"
        if not uses and data.get("program") in (None, []):
            wanted = "a [model] with [generate] or [encode], or a [[program]]"
            yield (), f"nothing to build; expected {wanted}"
    if len(uses) > 1:
        yield ("encode",), "expected no [generate] beside it: a model is a decoder or an encoder"


def value_problems(data: dict[str, Any], directory: Path) -> Problems:
    """Find what is wrong with values of the right type. pydantic finds those of a wrong type."""
    yield from _bundle_problems(table(data.get("bundle")), directory)
    yield from _model_problems(table(data.get("model")), directory)
    if "module" in table(data.get("model")):
        yield from _own_model_problems(data, directory)
    yield from _generate_problems(table(data.get("generate")))
    yield from _source_problems("draft", table(data.get("draft")), directory)
    yield from section_checks.draft_problems(data)
    yield from section_checks.adapter_problems(data)
    yield from section_checks.image_problems(data)
    if "encode" in data:
        yield from _encode_problems(table(data["encode"]))
    programs = data.get("program")
    for index, program in enumerate(_items(programs)):
        for where, problem in _program_problems(table(program), directory):
            yield ("program", index, *where), problem
    yield from _repeated_names(programs)
    yield from _library_problems(data, directory)
    yield from _mesh_problems(data)
    yield from section_checks.axis_problems(data)
    yield from section_checks.slo_problems(data)
    yield from _number_problems(data)


def _number_problems(data: dict[str, Any]) -> Problems:
    """Find the section with which the manifest passes MAX_PROGRAMS, counted from the first."""
    generate, encode = table(data.get("generate")), table(data.get("encode"))
    # Each batch and context has prefill, decode, verify and two copies: see specs.py.
    names = ("batch", "context", "prompt", "source", "images")
    batches, contexts, *sizes_of = (len(_items(generate.get(name))) for name in names)
    counts: list[tuple[KeyPath, int]] = [
        (("generate",), batches * contexts * (4 + sum(sizes_of))),
        (("draft",), contexts * (3 + sizes_of[0]) * ("draft" in data)),
        (("encode", "shapes"), 3 * len(_items(encode.get("shapes")))),
        (("encode", "packed"), 3 * len(_items(encode.get("packed")))),
        (("encode", "images"), len(_items(encode.get("images")))),
    ]
    for index, program in enumerate(map(table, _items(data.get("program")))):
        sizes = [*table(program.get("buckets")).values(), *table(program.get("static")).values()]
        sizes += [program.get("repeat") or [1]]
        counts.append((("program", index), math.prod(len(_items(each)) for each in sizes)))
    total = 0
    for where, count in counts:
        total += count
        if total > MAX_PROGRAMS:
            yield where, wrong(f"at most {MAX_PROGRAMS:,} programs in a manifest", total)
            return


def _encode_problems(encode: dict[str, Any]) -> Problems:
    shapes, images = encode.get("shapes"), encode.get("images")
    for at, problem in _size_problems(images or None):
        yield ("encode", "images", *at), problem
    is_empty = not shapes and not images and not encode.get("packed")
    if is_empty and (shapes is None or isinstance(shapes, list)):
        yield ("encode", "shapes"), f"expected {SHAPES}; found {'none' if shapes is None else '[]'}"
    yield from section_checks.result_problems(encode)
    if not isinstance(shapes, list):
        return
    first: set[tuple[int, ...]] = set()
    for index, shape in enumerate(shapes):
        if not is_int_list(shape):
            continue
        where = ("encode", "shapes", index)
        if len(shape) == 2:
            for place, size in enumerate(shape):
                if not 0 < size <= MAX_SIZE:
                    yield (*where, place), wrong(SIZE, size)
        if tuple(shape) in first:
            yield where, f"expected each shape once; found {shown(shape)} again"
        first.add(tuple(shape))


def _mesh_problems(data: dict[str, Any]) -> Problems:
    mesh, batches = table(data.get("mesh")), table(data.get("generate")).get("batch")
    for name in ("data", "tensor"):
        size = mesh.get(name)
        if type(size) is int and not 0 < size <= MAX_MESH_DEVICES:
            yield ("mesh", name), wrong(expected(f"mesh.{name}"), size)
    if mesh and "encode" in data:
        yield ("mesh",), "expected no [encode] beside it: a mesh splits a decoder only"
    if mesh and table(data.get("model")).get("dtype") == "int4":
        yield ("mesh",), "expected none beside model.dtype int4: words of 8 values are not split"
    rows = mesh.get("data")
    if type(rows) is int and rows > 0 and is_int_list(batches):
        for index, batch in enumerate(batches):
            if batch % rows:
                problem = f"expected a multiple of {rows}, which mesh.data is; found {batch}"
                yield ("generate", "batch", index), problem


def is_bundle_name(name: str) -> bool:
    """Return whether a name has the form of a path component in an OCI reference.

    Source: distribution-spec, "Pulling manifests".
    """
    form = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
    return len(name) <= 128 and re.fullmatch(form, name) is not None


def _bundle_problems(bundle: dict[str, Any], directory: Path) -> Problems:
    name, license_path = bundle.get("name"), bundle.get("license")
    if isinstance(name, str) and not is_bundle_name(name):
        yield ("bundle", "name"), wrong(expected("bundle.name"), name)
    elif isinstance(name, str) and name.endswith(BESIDE):
        ends = ", ".join(BESIDE)
        problem = f"expected a name that does not end with {ends}, as files beside a bundle do"
        yield ("bundle", "name"), f"{problem}; found {shown(name)}"
    if isinstance(license_path, str) and not os.path.isfile(directory / license_path):
        yield ("bundle", "license"), no_such_path("file", license_path, directory)


def _source_problems(section: str, model: dict[str, Any], directory: Path) -> Problems:
    source, dtype = (model.get(key) for key in ("source", "dtype"))
    if isinstance(source, str):
        if "://" in source:
            if not re.fullmatch(r"hf://[\w.-]+/[\w.-]+(?:@[\w./-]+)?", source, re.ASCII):
                yield (section, "source"), wrong(expected("model.source"), source)
        elif not source or not (os.path.isdir(directory / source) or source.endswith(".gguf")):
            yield (section, "source"), no_such_path("directory", source, directory)
    if isinstance(dtype, str) and dtype not in DTYPES:
        problem = wrong(expected("model.dtype"), dtype, did_you_mean(dtype, DTYPES))
        yield (section, "dtype"), problem


def _model_problems(model: dict[str, Any], directory: Path) -> Problems:
    text = model.get("evaluation")
    yield from _source_problems("model", model, directory)
    if isinstance(text, str) and not os.path.isfile(directory / text):
        yield ("model", "evaluation"), no_such_path("file", text, directory)
    if text is not None and model.get("accuracy") is False:
        problem = "expected none beside accuracy = false, which measures nothing"
        yield ("model", "evaluation"), problem
    if model.get("adapters") and "module" in model:
        yield ("model", "adapters"), "expected source, and no module, beside it"
    for index, problem in _reads_problems(model.get("reads"), directory):
        yield ("model", "reads", index), problem
    if model.get("reads") and "module" not in model:
        yield ("model", "reads"), "expected module beside it, whose code reads them"
    if "params" in model and "module" not in model:
        yield ("model", "params"), "expected module beside it; a source has its own weights"


def _own_model_problems(data: dict[str, Any], directory: Path) -> Problems:
    model = table(data.get("model"))
    module, params = model["module"], model.get("params")
    if not isinstance(module, str) or not names_object(module):
        yield ("model", "module"), wrong(expected("model.module"), module)
    if isinstance(params, str):
        for _, problem in _params_problems(params, directory):
            yield ("model", "params"), problem
    elif params is not None:
        yield ("model", "params"), wrong(expected("model.params"), params)
    if "evaluation" in model and "source" not in model:
        yield ("model", "evaluation"), "expected source beside it, a directory with tokenizer.json"
    if "encode" in data:
        yield ("encode",), "expected [generate]: an encoder of your own is a [[program]]"
    yield from section_checks.own_dtype_problems(data)
    if "mesh" in data:
        problem = (
            "expected none beside model.module: a mesh splits a model with a source, or a [[program]]; "
            "splitting a model of your own is not built"
        )
        yield ("mesh",), problem


def _params_problems(params: str, directory: Path) -> Problems:
    found = os.path.isfile if params.endswith(".safetensors") else os.path.isdir
    if not params or not found(directory / params):
        kind = ".safetensors file or an orbax directory"
        yield ("params",), no_such_path(kind, params, directory)


def _reads_problems(reads: Any, directory: Path) -> Iterator[tuple[int, str]]:
    """Find paths that do not exist; a glob pattern may match nothing yet."""
    for index, name in enumerate(_items(reads)):
        if not isinstance(name, str) or (re.search(r"[*?\[]", name) and "\0" not in name):
            continue
        path = directory / name
        # The content of a FIFO or a device has no end.
        if not name or not (os.path.isfile(path) or os.path.isdir(path)):
            yield index, no_such_path("file or directory", name, directory)


def _generate_problems(generate: dict[str, Any]) -> Problems:
    for name in ("batch", "prompt", "context", "source", "images"):
        sizes = generate.get(name)
        if name in ("source", "images") and sizes == []:
            continue  # as Python's default: the model is no encoder-decoder, or reads no images
        for where, problem in _size_problems(sizes):
            yield ("generate", name, *where), problem
    prompts, contexts = generate.get("prompt"), generate.get("context")
    if is_int_list(prompts) and is_int_list(contexts) and contexts:
        longest = max(contexts)
        for index, prompt in enumerate(prompts):
            if prompt > longest:
                problem = f"expected at most {longest}, the longest context; found {shown(prompt)}"
                yield ("generate", "prompt", index), problem
        shortest = min(contexts)  # a prompt enters the context that it fits, in chunks
        if prompts and min(prompts) > shortest:
            problem = f"expected one of at most {shortest}, the shortest context; found {prompts}"
            yield ("generate", "prompt"), problem
    dtype = generate.get("cache_dtype")
    if isinstance(dtype, str) and dtype not in CACHE_DTYPES:
        wanted, guess = expected("generate.cache_dtype"), did_you_mean(dtype, CACHE_DTYPES)
        yield ("generate", "cache_dtype"), wrong(wanted, dtype, guess)
    draft = generate.get("draft_tokens")
    if type(draft) is int:
        least = min([MAX_DRAFT + 1, *(contexts if is_int_list(contexts) else ())])
        if not 0 <= draft < least:
            yield ("generate", "draft_tokens"), wrong(expected("generate.draft_tokens"), draft)


def _program_problems(program: dict[str, Any], directory: Path) -> Problems:
    name, function, params = (program.get(key) for key in ("name", "function", "params"))
    if isinstance(name, str):
        if name in OWN_NAMES:
            yield ("name",), f"{shown(name)} is the name of a program of [model]; expected another"
        elif not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            yield ("name",), wrong(expected("program[].name"), name)
    is_file = isinstance(function, str) and bool(function) and os.path.isfile(directory / function)
    if isinstance(function, str) and not (names_object(function) or is_file):
        yield ("function",), wrong(expected("program[].function"), function)
    if isinstance(params, str):
        yield from _params_problems(params, directory)
    for index, problem in _reads_problems(program.get("reads"), directory):
        yield ("reads", index), problem
    for variable, sizes in table(program.get("buckets")).items():
        for where, problem in _size_problems(sizes):
            yield ("buckets", variable, *where), problem
    args = program.get("args")
    if args is None and not is_file:
        yield ("args",), f"missing; expected {expected('program[].args')}"
    elif isinstance(args, str):
        if not names_object(args):
            yield ("args",), wrong(expected("program[].args"), args)
    elif args is not None:
        yield from _args_problems(args, program.get("buckets", {}))
    yield from _static_problems(program.get("static"), args)
    yield from key_problems("donate", program.get("donate"), args)
    yield from key_problems("carry", program.get("carry"), args)
    for key in ("donate", "carry", "pad", "open_sizes"):
        yield from _repeated_items(key, program.get(key))
    for where, problem in _size_problems(program.get("repeat") or None):
        yield ("repeat", *where), problem
    if program.get("repeat") and not program.get("carry"):
        yield ("repeat",), "expected carry beside it, which names the arguments that come back"
    if program.get("carry") and not program.get("repeat"):
        yield ("carry",), "expected repeat beside it, the numbers of steps that one call runs"
    if program.get("repeat") and REPEAT in (*table(args), *table(program.get("static"))):
        yield ("repeat",), f"expected no other argument of the name {REPEAT!r} beside it"
    buckets = table(program.get("buckets"))
    for key in ("pad", "open_sizes"):
        named = program.get(key)
        # pydantic reports a text in a file, not in Python.
        if isinstance(named, str) and named != UNCHECKED:
            yield (key,), wrong(expected(f"program[].{key}"), named)
        for index, variable in enumerate(_items(named)):
            if variable not in (*buckets, UNCHECKED):
                yield (key, index), undefined(str(variable), buckets)
    mask = program.get("mask")
    if mask is not None and not program.get("pad"):
        yield ("mask",), "expected pad beside it, which says what is padded"
    if isinstance(args, dict) and isinstance(mask, str) and mask not in args:
        yield ("mask",), f"expected an argument, one of {', '.join(args)}; found {shown(mask)}"
    for inside, problem in _check_problems(program, directory):
        yield ("check", *inside), problem


def _check_problems(program: dict[str, Any], directory: Path) -> Problems:
    check = program.get("check")
    if not isinstance(check, dict):
        return
    function, files, tolerance = (check.get(key) for key in ("function", "files", "tolerance"))
    if function is None and not files:
        yield (), "expected function or files in it, which have the results; found neither"
    if function is not None and not (isinstance(function, str) and names_object(function)):
        yield ("function",), wrong(expected("program[].check.function"), function)
    if program.get("repeat"):
        yield (), "expected none beside repeat: check a program of the function without it"
    for index, name in enumerate(_items(files)):
        if isinstance(name, str) and not os.path.isfile(directory / name):
            yield ("files", index), no_such_path(".npz file", name, directory)
    if isinstance(tolerance, int | float) and not 0 < tolerance < 1:
        yield ("tolerance",), wrong(expected("program[].check.tolerance"), tolerance)


def _library_problems(data: dict[str, Any], directory: Path) -> Problems:
    found = [table(each).get("name") for each in _items(data.get("target"))]
    names = {name for name in found if isinstance(name, str)}
    # A target that was made in Python has its version of jax in its name.
    names |= {re.sub(r"-jax[\d.]+$", "", name) for name in names}
    for index, library in enumerate(map(table, _items(data.get("library")))):
        path, handlers, wanted = (library.get(key) for key in ("path", "handlers", "targets"))
        where = ("library", index)
        if isinstance(path, str) and not os.path.isfile(directory / path):
            yield (*where, "path"), no_such_path("file", path, directory)
        if handlers == {}:
            yield (*where, "handlers"), f"expected {expected('library[].handlers')}; found {{}}"
        for name, symbol in table(handlers).items():
            for text in (name, symbol):
                if isinstance(text, str) and not HANDLER_NAME.fullmatch(text):
                    yield (*where, "handlers", name), wrong("letters, digits and . _ - $", text)
        for place, name in enumerate(_items(wanted)):
            if isinstance(name, str) and name not in names:
                named, guess = expected("library[].targets[]"), did_you_mean(name, sorted(names))
                yield (*where, "targets", place), wrong(named, name, guess)


def _static_problems(static: Any, args: Any) -> Problems:
    for name, values in table(static).items():
        if not name.isidentifier() or keyword.iskeyword(name):
            yield ("static", name), f"expected the name of an argument; found {shown(name)}"
        if isinstance(args, dict) and name in args:
            yield ("static", name), f"expected a name that args has not; found {shown(name)}"
        if isinstance(values, list) and (not values or len({*map(repr, values)}) < len(values)):
            yield ("static", name), wrong(STATIC, values)


def key_problems(key: str, given: Any, args: Any) -> Problems:
    """Find names or positions under `donate` or `carry` that args have not; args may be examples, too."""
    if not isinstance(given, list | tuple) or not isinstance(args, dict | list | tuple):
        return
    known = [*args] if isinstance(args, dict) else [*range(len(args))]
    for index, argument in enumerate(given):
        if argument not in known or type(argument) is bool:
            names = ", ".join(map(shown, known)) or "none"
            guess = did_you_mean(str(argument), map(str, known))
            problem = f"expected an argument, one of {names}; found {shown(argument)}{guess}"
            yield (key, index), problem


def _repeated_items(key: str, given: Any) -> Problems:
    items = _items(given)
    for index, item in enumerate(items):
        if item in items[:index] and isinstance(item, str | int):
            yield (key, index), f"expected each once; found {shown(item)} again"


def _args_problems(args: Any, buckets: Any) -> Problems:
    if not isinstance(args, dict | list):
        yield ("args",), wrong(expected("program[].args"), args)
        return
    defined = buckets if isinstance(buckets, dict) else None  # pydantic reports the rest
    used: set[str] = set()
    understood = True
    for where, leaf in _leaves(args, ("args",)):
        if not isinstance(leaf, str):
            understood = False
            yield where, wrong(expected("program[].args.*"), leaf)
            continue
        try:
            _, extents, _ = split_shape(leaf)
        except ValueError as error:
            understood = False
            yield where, str(error)
            continue
        largest = math.prod(_largest(extent, defined) for extent in extents)
        if largest > MAX_ELEMENTS:
            problem = f"expected at most 2**40 elements; found {shown(leaf)} of {shown(largest)}"
            yield where, problem
        variables = [extent for extent in extents if isinstance(extent, str)]
        used.update(variables)
        for variable in variables:
            if defined is not None and variable not in defined:
                yield where, undefined(variable, defined)
    for variable in defined or () if understood else ():
        if variable not in used:
            uses = f"they use {', '.join(sorted(used))}" if used else "they use none"
            yield ("buckets", variable), f"expected a bucket variable that args use; {uses}"


def _largest(extent: int | str, buckets: dict[str, Any] | None) -> int:
    """Return the largest size that an extent of a shape string takes."""
    sizes = [extent] if isinstance(extent, int) else (buckets or {}).get(extent)
    return max([1, *sizes]) if is_int_list(sizes) else 1


def _size_problems(sizes: Any) -> Problems:
    if not isinstance(sizes, list):
        return
    if not sizes:
        yield (), f"expected {SIZES}; found []"
    seen = set[int]()
    for index, size in enumerate(sizes):
        if type(size) is not int:
            continue
        if not 0 < size <= MAX_SIZE:
            yield (index,), wrong(SIZE, size)
        if size in seen:
            yield (index,), f"expected each size once; found {shown(size)} again"
        seen.add(size)


def _repeated_names(programs: Any) -> Problems:
    first: dict[str, int] = {}
    for index, program in enumerate(_items(programs)):
        name = table(program).get("name")
        if isinstance(name, str) and (other := first.setdefault(name, index)) != index:
            problem = (
                f"expected each name once; found {shown(name)}, which is program[{other}].name too"
            )
            yield ("program", index, "name"), problem


def _leaves(tree: Any, where: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in pairs:
        if isinstance(value, dict | list):
            yield from _leaves(value, (*where, key))
        else:
            yield (*where, key), value


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def is_int_list(value: Any) -> TypeGuard[list[int]]:
    """Return whether value is a list of integers; true and false are none."""
    return isinstance(value, list) and all(type(item) is int for item in value)
