"""Random functions give what jax.jit gives, in every way to call them, or a refusal."""

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from .campaign import ROOT, check, facts, setting, write_figures
from .differential import BAD, SAME
from .random_functions import EXAMPLE

CHECKS = setting("DIFFERENTIAL_CHECKS", 400)
SEED = setting("DIFFERENTIAL_SEED", 0)
WHOLE_CHECKS = 100_000
AT_ONCE = 2
BATCH_CHECKS = min(5000, CHECKS // AT_ONCE + 250)
BATCH_FUNCTIONS = min(25, BATCH_CHECKS // 200)
pytestmark = pytest.mark.timeout(900 + CHECKS)


def test_every_way_answers_as_jax_does_or_refuses():
    batches = []
    done = 0  # a batch may end before it has all of its checks
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while done < CHECKS:
            first = SEED + len(batches)
            batches += pool.map(run, range(first, first + AT_ONCE))
            done = sum(count for batch in batches for *_, count in batch["counts"])
    rows = [row for batch in batches for row in batch["counts"]]

    def counted(place, *, only=""):
        found = Counter[str]()
        for row in rows:
            if only in ("", row[0]):
                found[row[place]] += row[3]
        return found

    outcomes = counted(2)
    figures = {
        **facts("jax"),
        "seeds": [SEED, SEED + len(batches) - 1],
        "functions": len(batches) * BATCH_FUNCTIONS,
        "checks": outcomes.total(),
        "outcomes": dict(sorted(outcomes.items())),
        "checks by kind of arguments": dict(sorted(counted(0).items())),
        "checks by way": dict(sorted(counted(1).items())),
    }
    print(json.dumps(figures, indent=1))
    if CHECKS >= WHOLE_CHECKS:
        write_figures("differential", figures)
    check([text for batch in batches for text in batch["bad"]])
    assert not any(outcomes[each] for each in BAD)
    assert outcomes[SAME] > outcomes.total() / 3
    assert counted(2, only=EXAMPLE)[SAME] > 0


def run(seed):
    """Run a batch in a process of its own: what jax and XLA keep of its functions goes with it."""
    numbers = map(str, (seed, BATCH_FUNCTIONS, BATCH_CHECKS))
    words = ("-m", "tests.campaigns.differential", *numbers)
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    again = " ".join((".venv/bin/python", *words))
    assert done.returncode == 0, f"{again}\n{done.stderr[-3000:]}"
    found = json.loads(done.stdout)
    found["bad"] = [f"{text}\nrepeat it: {again}" for text in found["bad"]]
    return found
