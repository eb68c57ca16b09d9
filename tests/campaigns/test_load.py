"""The knee that `prejit load` finds, beside that of every rate of a grid."""

import json
import time

import numpy as np
import pytest
from tests.integration.test_serve import Process
from tests.queued_server import queued_server

from prejit.server.load.load_runs import LoadOptions, run_load
from prejit.server.load.load_search import LoadLimits
from prejit.server.load.workload import DrawnLoad, Lengths

from .campaign import ROOT, facts, figures_file, machine_facts, setting, write_figures

SECONDS = setting("LOAD_SECONDS", 0) or 0.3
IS_WHOLE = SECONDS >= 5
WORKERS, SERVICE_MS = 4, 40.0
CAPACITY = WORKERS / SERVICE_MS * 1e3  # requests a second of the queue
MOST_APART = 0.05
pytestmark = [pytest.mark.timeout(1800), pytest.mark.thorough]


def options(rates=(), *, seconds=SECONDS, seed=0, new_tokens=4):
    new = Lengths(new_tokens, new_tokens)
    drawn = DrawnLoad("completions", "", 1.0, Lengths(16, 16), new)  # of the only model
    return LoadOptions(rates, seconds, LoadLimits(), seed, None, drawn)


def write(part, figures):
    """Print a part of the figures; keep it if the campaign is a whole one."""
    print(json.dumps(figures, indent=1))
    if IS_WHOLE:
        path = figures_file("load")
        kept = json.loads(path.read_text()) if path.exists() else {}
        figures = {**machine_facts(), "seconds of a window": SECONDS, **figures}
        write_figures("load", {**kept, **facts("numpy", "kernel"), part: figures})


def searched(url, grid, *, refuses=False, **changed):
    """Return the knee of a search, and that of every rate of a grid; a server may refuse what is too much."""

    def run(asked):
        report = run_load(url, asked, lambda line: None)
        assert refuses or not any(each.failures for each in report.rates), report
        return report

    began = time.monotonic()
    found = run(options(**changed)).knee
    seconds = time.monotonic() - began
    assert found is not None
    began = time.monotonic()
    rates = tuple(round(float(each * found.rate), 3) for each in grid)
    # Another seed, so that the two do not agree because both saw the same requests.
    every = run(options(rates, seed=1000, **{"seconds": 2 * SECONDS, **changed})).rates
    assert not every[0].failures, every[0]
    kept = np.array([each.growth is not None and each.growth <= 0.02 for each in every])
    # The rate that has the fewest others on the wrong side.
    agree = [kept[: at + 1].sum() + (~kept[at + 1 :]).sum() for at in range(len(every))]
    return {
        "knee": round(found.rate, 2),
        "not any more": round(found.above, 2),
        "is certain": found.is_certain,
        "seconds of the search": round(seconds),
        "exhaustive": every[int(np.argmax(agree))].rate,
        "rates of it": len(rates),
        "seconds of it": round(time.monotonic() - began),
        "growth by rate": {str(each.rate): round(each.growth or 0, 4) for each in every},
    }


def test_the_knee_of_a_queue_whose_capacity_is_known():
    grid = np.arange(0.92, 1.0801, 0.02) if IS_WHOLE else np.array([0.8, 1.2])
    with queued_server("--workers", WORKERS, "--service-ms", SERVICE_MS) as url:
        figures = {"capacity": CAPACITY, **searched(url, grid)}
    write("queue", figures)
    if IS_WHOLE:
        assert figures["knee"] == pytest.approx(CAPACITY, rel=MOST_APART)
        assert figures["knee"] == pytest.approx(figures["exhaustive"], rel=MOST_APART)


@pytest.mark.skipif(not IS_WHOLE, reason="tests/integration/test_load.py has real servers")
def test_the_knee_of_a_real_server():
    bundle = ROOT / "artifacts" / "demo"
    grid = np.arange(0.88, 1.1201, 0.02)
    server = Process(bundle).wait_until_ready()
    try:
        more = searched(server.url, grid, refuses=True, new_tokens=16)
        figures = {"bundle": bundle.name, **more}
    finally:
        server.kill()
    write("demo", figures)
    assert figures["knee"] == pytest.approx(figures["exhaustive"], rel=MOST_APART)
