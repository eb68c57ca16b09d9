"""The JSON Schema of manifests accepts what `read_manifest` accepts, and shows mistakes of form."""

import copy
import json
import tomllib
from dataclasses import fields
from pathlib import Path

import jsonschema

from prejit.compiler.manifest.manifest_tables import SECTIONS, manifest_schema

from .test_manifest import ENCODER, GOOD

ROOT = Path(__file__).parents[4]
SCHEMA = manifest_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_every_manifest_here_follows_it(said):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(said("schema")) == SCHEMA
    texts = [path.read_text() for path in ROOT.glob("manifests/*.toml")]
    assert texts
    for text in (*texts, GOOD, ENCODER):
        VALIDATOR.validate(tomllib.loads(text))


WRONG = {
    "unknown section": lambda m: m.update(genrate={}),
    "no target": lambda m: m.pop("target"),
    "name with capitals": lambda m: m["bundle"].update(name="Demo"),
    "unknown dtype": lambda m: m["model"].update(dtype="float16"),
    "unknown cache dtype": lambda m: m["generate"].update(cache_dtype="int4"),
    "size twice": lambda m: m["generate"].update(batch=[1, 1]),
    "size that is text": lambda m: m["generate"].update(batch=["1"]),
    "model without source and module": lambda m: m["model"].pop("source"),
    "params of no module": lambda m: m["model"].update(params="score.safetensors"),
    "model without buckets": lambda m: m.pop("generate"),
    "decoder and encoder": lambda m: m.update(encode={"shapes": [[1, 16]]}),
    "shape of three": lambda m: (m.pop("generate"), m.update(encode={"shapes": [[1, 2, 3]]})),
    "function without attribute": lambda m: m["program"][0].update(function="module"),
    "name of a program of ours": lambda m: m["program"][0].update(name="decode"),
    "args that are a number": lambda m: m["program"][0].update(args={"x": 3}),
    "unknown platform": lambda m: m["target"][0].update(name="mine", platform="rocm"),
    "unknown key of a GPU": lambda m: m["target"][0].update(gpu={"cores": 3}),
}


def test_mistakes_of_form_do_not_follow_it_and_every_key_is_described():
    for mistake, change in WRONG.items():
        data = copy.deepcopy(tomllib.loads(GOOD))
        change(data)
        assert not VALIDATOR.is_valid(data), mistake
    for name, (kind, repeated) in SECTIONS.items():
        section = SCHEMA["properties"][name]
        section = section["items"] if repeated else section
        assert section["additionalProperties"] is False
        assert set(section["properties"]) == {field.name for field in fields(kind)}
        for key, value in section["properties"].items():
            assert value["description"].endswith("."), f"{name}.{key}: a sentence that is cut off"
    features = {"platform": "cpu", "cpu": "znver4", "cpu_features": ["avx"]}
    for more in ({"fingerprint": "web-3.json"}, features):
        VALIDATOR.validate({**tomllib.loads(GOOD), "target": [{"name": "mine", **more}]})
