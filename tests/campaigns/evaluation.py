"""lm-evaluation-harness against `prejit serve`, and the same tasks with transformers on its checkpoint."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.campaigns.campaign import ROOT, facts, figures_file, write_figures
from tests.integration.test_serve import Process
from tests.manifests import write_manifest

TASKS = Path(__file__).with_name("evaluation_tasks")
SHARED = Path(os.environ.get("PREJIT_SHARED", ROOT / "shared"))
MOST_DIFFERENCE = 1e-4  # log-likelihoods of texts of up to 40 tokens may differ by so much
_NAMES = tuple(sorted(f"prejit_{path.stem}" for path in TASKS.glob("*.yaml")))


def main(python):
    """Run the tasks both ways and write the figures; return 1 if they differ."""
    model = SHARED / "data" / "stories260k"
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        sizes = {"batch": (1, 8), "prompt": (32,)}
        manifest = write_manifest(directory / "stories.toml", model, name="stories", **sizes)
        prejit = [sys.executable, "-m", "prejit.runtime"]
        subprocess.run([*prejit, "build", manifest, "-o", directory], check=True)
        server = Process(directory / "stories").wait_until_ready()
        try:
            started = time.perf_counter()
            options = {
                **{"model": "stories", "base_url": f"{server.url}/v1/completions"},
                **{"tokenizer": model, "tokenizer_backend": "huggingface"},
                **{"num_concurrent": 4, "max_length": 256, "add_bos_token": True},
            }
            served = _harness(python, directory / "served", "local-completions", options)
            seconds = time.perf_counter() - started
        finally:
            server.kill()
        options = {"pretrained": model, "dtype": "float32", "add_bos_token": True}
        options["max_length"] = 256
        expected = _harness(python, directory / "expected", "hf", options, "--device", "cpu")
    compared = {name: _compared(served[name], expected[name]) for name in _NAMES}
    packages = ("lm_eval", "torch", "transformers")
    asked = f"import importlib.metadata as m; print(*map(m.version, {packages}))"
    versions = subprocess.check_output([python, "-c", asked], text=True).split()
    figures = {
        "date": facts()["date"],
        "versions": dict(zip(packages, versions, strict=True)),
        "most_difference_allowed": MOST_DIFFERENCE,
        "seconds_of_local_completions": round(seconds),
        "tasks": compared,
    }
    write_figures("evaluation", figures)
    sys.stdout.write(figures_file("evaluation").read_text())
    found = compared.values()
    return any(each["most_difference"] > MOST_DIFFERENCE or each["other"] for each in found)


def _harness(python, output, kind, options, *more):
    given = ",".join(f"{name}={value}" for name, value in options.items())
    command = [python, "-m", "lm_eval", "run", "--model", kind, "--model_args", given, *more]
    command += ["--tasks", ",".join(_NAMES), "--include_path", str(TASKS), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    environment = {**os.environ, **offline, "HF_HOME": str(output / "cache")}
    # The tasks name their data by relative paths.
    subprocess.run([*command, "--output_path", str(output)], check=True, cwd=TASKS, env=environment)
    answers = {}
    for name in _NAMES:
        [path] = output.glob(f"**/samples_{name}_*.jsonl")
        items = [json.loads(line) for line in path.read_text().splitlines()]
        items.sort(key=lambda item: item["doc_id"])
        answers[name] = [answer for item in items for [answer] in item["resps"]]
    return answers


def _compared(found, expected):
    """Return how far answers differ. Each is a text, a log-likelihood, or one with a greedy flag."""
    difference, other = 0.0, 0
    for one, two in zip(found, expected, strict=True):
        first, second = (each if isinstance(each, list) else [each] for each in (one, two))
        try:
            difference = max(difference, abs(float(first[0]) - float(second[0])))
            other += first[1:] != second[1:]
        except ValueError:  # a text
            other += first[0].lstrip() != second[0].lstrip()
    return {"answers": len(found), "most_difference": difference, "other": other}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
