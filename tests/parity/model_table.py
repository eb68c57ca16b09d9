"""The table of models: every decoder against torch over 64 greedy steps, also in int8 and int4.

python -m tests.parity.model_table PYTHON DIRECTORY [--build]

PYTHON has torch and transformers; DIRECTORY keeps what it said. What models.json has is not computed
again, unless the file is removed. `--build` adds what `prejit build` takes for the first model of each
model_type.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from tests.manifests import write_manifest

from .model_table_cases import STEPS, Scaled, decoder_cases, first_of_each, wide
from .test_few_bits_parity import Stored
from .test_parity import CONTEXT, Model

RESULTS = Path(__file__).parent / "models.json"
_IN_GROUP = 32
"""Values of int4 that share a scale, which nothing else has in float16."""


class Sized(Stored):
    """A checkpoint whose matrices are stored in a dtype, and the share of its values in four bits."""

    def __init__(self, directory, dtype, forms):
        super().__init__(directory, dtype, forms, CONTEXT)
        scales = [each for each in self.weights.values() if each.dtype == np.float16]
        self.share = sum(_IN_GROUP * each.size for each in scales) / self.values


def divergence(exact, found):
    """The mean over steps of the KL divergence from what torch's logits say, in nats."""

    def logs(logits):
        wide = logits.astype(np.float64)
        wide -= wide.max(-1, keepdims=True)
        return wide - np.log(np.exp(wide).sum(-1, keepdims=True))

    of_exact, of_found = logs(exact), logs(found)
    return float((np.exp(of_exact) * (of_exact - of_found)).sum(-1).mean())


def compared(case, recorded, forms):
    """What the table says of a case in float32."""
    before = time.process_time()
    torch, ours, _ = _followed(case, recorded, "float32", forms)
    return {
        "difference": float(np.abs(ours - torch).max()),
        "equal_tokens": int((ours.argmax(1) == torch.argmax(1)).sum()),
        "spread": float(torch.std(1).mean()),
        "cpu_seconds": round(time.process_time() - before, 1),
    }


def narrowed(case, recorded, forms):
    """What the table says of a wide case in int8 and int4."""
    with np.load(recorded / f"{case.name}.npz") as file:
        if "error" in file:
            return {"error": str(file["error"])}
    found = {}
    for dtype in ("int8", "int4"):
        torch, ours, share = _followed(case, recorded, dtype, forms)
        found[dtype] = divergence(torch, ours)
        found["share_in_four_bits"] = round(share, 3)
    return found | {"spread": float(torch.std(1).mean())}


def _followed(case, recorded, dtype, forms):
    """Logits of torch and ours over the same tokens; and the share of values in four bits."""
    with np.load(recorded / f"{case.name}.npz") as file:
        torch, shapes = file["logits"], json.loads(str(file["shapes"]))
        changes = {"factor": float(file["factor"])} if isinstance(case, Scaled) else {}
    with tempfile.TemporaryDirectory() as directory:
        at = Path(directory)
        replace(case, shapes=shapes, **changes).write(at)
        model = Model(at, CONTEXT, forms) if dtype == "float32" else Sized(at, dtype, forms)
        ours = model.follow(case.prompt, torch[:-1].argmax(1))
    assert ours.shape == torch.shape == (STEPS, case.config["vocab_size"])
    return torch, ours, getattr(model, "share", 0.0)


def built(case, recorded, cache):
    """What `prejit build` takes, its process and those that it starts."""
    with np.load(recorded / f"{case.name}.npz") as file:
        shapes = json.loads(str(file["shapes"]))
    with tempfile.TemporaryDirectory() as directory:
        at = Path(directory)
        replace(case, shapes=shapes).write(at / "model")
        sizes = {"prompt": (32,), "context": (96,)}
        write_manifest(at / "model.toml", "model", model="accuracy = false", **sizes)
        command = [sys.executable, "-m", "prejit.runtime", "build", str(at / "model.toml")]
        before, start = _cpu_seconds(), time.monotonic()
        subprocess.run(
            [*command, "-o", str(at), "--cache", str(cache)], check=True, capture_output=True
        )
        took = time.monotonic() - start
    return {"cpu_seconds": round(_cpu_seconds() - before, 1), "seconds": round(took, 1)}


def _cpu_seconds():
    """CPU time of the processes that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def to_text(table):
    """The table as JSON with a line for each case."""
    text = json.dumps(table, indent=1) + "\n"
    return re.sub(r"\{[^{}]*\}", lambda found: json.dumps(json.loads(found[0])), text)


def forms_with_kernels(cache):
    """This machine's kernels, made known to XLA."""
    from tests.kernel_bundles import registered_forms

    return registered_forms(cache)


def main(python, directory, *, build):
    """Compare all that is not in models.json, and write it after each."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    command = [python, "-m", "tests.parity.model_table_cases", str(directory)]
    subprocess.run(command, check=True, env=environment)
    of_torch = json.loads((directory / "versions.json").read_text())
    versions = {name: version(name) for name in ("jax", "jaxlib", "prejit")} | of_torch
    forms, cases = forms_with_kernels(directory / "cache"), [*decoder_cases()]
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": {}}
    models = known["models"]

    def add(case, what, make):
        row = models.setdefault(case.config["model_type"], {})
        found = row.setdefault(what, {})
        if case.name in found:
            return
        found[case.name] = make()
        print(case.name, what, found[case.name], flush=True)
        row["class"] = case.config["architectures"][0]
        written = {"date": str(date.today()), "steps": STEPS, "versions": versions}
        written["models"] = dict(sorted(models.items()))
        RESULTS.write_text(to_text(written))

    first = first_of_each(cases)
    for case in first:
        add(case, "float32", partial(compared, case, directory, forms))
    for case in first:
        add(case, "narrow", partial(narrowed, wide(case), directory, forms))
    for case in cases:
        add(case, "float32", partial(compared, case, directory, forms))
    for case in first if build else ():
        add(case, "build", partial(built, case, directory, directory / "cache"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), build="--build" in sys.argv)
