"""Manifests that tests build: of a decoder, of an encoder, and of functions."""

import json


def write_manifest(
    path,
    source=None,
    *,
    name="model",
    batch=(1,),
    prompt=(16,),
    context=(256,),
    targets=("cpu-host",),
    bundle="",
    model="",
    generate="",
):
    """Write a manifest of a decoder; `bundle`, `model` and `generate` are more lines of these sections."""
    where = "" if source is None else f"source = {json.dumps(str(source))}\n"
    path.write_text(
        f"[bundle]\nname = {json.dumps(name)}\n{bundle}\n[model]\n{where}{model}\n"
        f"[generate]\nbatch = {list(batch)}\nprompt = {list(prompt)}\ncontext = {list(context)}\n{generate}\n"
        + "".join(f"[[target]]\nname = {json.dumps(target)}\n" for target in targets)
    )
    return path


def encoder_manifest(path, encode, *, source="model", model=""):
    """Write a manifest of an encoder; `model` and `encode` are lines of these sections."""
    path.write_text(
        f"[bundle]\nname = {json.dumps(path.stem)}\n[model]\nsource = {json.dumps(str(source))}\n{model}\n"
        f'[encode]\n{encode}\n[[target]]\nname = "cpu-host"\n'
    )
    return path


def functions_manifest(path, programs, targets=("cpu-host",), more=""):
    """Write a manifest of functions: by name, the keys of each with `; ` between them."""
    sections = [f"[[program]]\nname = {json.dumps(at)}\n{keys}\n" for at, keys in programs.items()]
    sections += [f"[[target]]\nname = {json.dumps(name)}\n" for name in targets]
    text = "".join(sections).replace("; ", "\n")
    path.write_text(f"[bundle]\nname = {json.dumps(path.stem)}\n{more}{text}")
    return path
