"""Programs of a bundle inside Triton, BentoML and MLServer answer what `Bundle.call` returns.

With PREJIT_PLATFORM_FIGURES the figures of the calls are written to tests/campaigns.
"""

import importlib
import os
import statistics
import time

import jax.numpy as jnp
import numpy as np
import pytest
from tests.campaigns.campaign import facts, machine_facts, write_figures
from tests.platform_servers import PLATFORM_SERVERS

from prejit.compiler import Program, build
from prejit.runtime import load

pytestmark = pytest.mark.thorough  # `make test-platforms`
CALLS = int(os.environ.get("PREJIT_PLATFORM_CALLS", "5"))
"""Calls of a program that takes some time, in turn with `Bundle.call`."""
X = np.random.default_rng(3).standard_normal((64, 1024), np.float32)
KINDS = {
    "b": np.array([True, False, True]),
    "i": np.arange(4, dtype=np.int8).reshape(2, 2),
    "h": np.arange(4, dtype=np.float16),
}
DATATYPES = {"bool": "BOOL", "int8": "INT8", "float16": "FP16", "float32": "FP32"}


def rank(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return {"scores": x[:, :8]}


def kinds(b, i, h, times=1):
    return {"b": ~b, "i": i * times, "h": h + 1}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory, build_cache):
    random = np.random.default_rng(4)
    weights = [random.standard_normal((1024, 1024), np.float32) / np.float32(32) for _ in range(24)]
    args = {"b": "bool[3]", "i": "int8[2, 2]", "h": "float16[4]"}
    programs = (
        Program("rank", rank, ["float32[64, 1024]"], params=weights),
        Program("kinds", kinds, args, static={"times": [1, 3]}),
    )
    output = tmp_path_factory.mktemp("platforms")
    return {
        program.name: build(
            program, output, name=f"of-{program.name}", cache=build_cache, quiet=True
        ).path
        for program in programs
    }


def infer(client, connection, model, given, **parameters):
    inputs = []
    for name, array in given.items():
        inputs.append(client.InferInput(name, list(array.shape), DATATYPES[array.dtype.name]))
        inputs[-1].set_data_from_numpy(array)
    return connection.infer(model, inputs, parameters=parameters or None)


@pytest.mark.parametrize("name", PLATFORM_SERVERS)
def test_a_server_of_others_answers_as_the_bundle_does(name, bundles, tmp_path):
    server = PLATFORM_SERVERS[name]
    if not server.is_here:
        pytest.skip(f"{server.package} is not installed: `make test-platforms` does it")
    some = {"rank": bundles["rank"]} if name == "BentoML" else bundles  # a service has one bundle
    before = machine_facts()
    with server.running(some, tmp_path) as address, load(bundles["rank"]) as bundle:
        client = importlib.import_module(f"tritonclient.{server.protocol}")
        connection = client.InferenceServerClient(address)
        as_json = {"as_json": True} if server.protocol == "grpc" else {}
        described = connection.get_model_metadata("rank", **as_json)
        [takes], [gives] = described["inputs"], described["outputs"]
        assert [int(size) for size in takes["shape"]] == [64, 1024]
        assert (gives["name"], gives["datatype"]) == ("scores", "FP32")
        expected = bundle.call("rank", X)["scores"]
        seconds = {"call": [], "server": []}
        for _ in range(CALLS):
            started = time.perf_counter()
            bundle.call("rank", X)
            seconds["call"].append(time.perf_counter() - started)
            started = time.perf_counter()
            found = infer(client, connection, "rank", {takes["name"]: X})
            seconds["server"].append(time.perf_counter() - started)
            np.testing.assert_array_equal(found.as_numpy("scores"), expected)
        with pytest.raises(Exception, match=r"static arguments of 'rank' \(none\), found 'speed'"):
            infer(client, connection, "rank", {takes["name"]: X}, speed=3)
        if "kinds" in some:
            found = infer(client, connection, "kinds", KINDS, times=3)
            for each, wanted in kinds(**KINDS, times=3).items():
                np.testing.assert_array_equal(found.as_numpy(each), wanted, strict=True)
    if os.environ.get("PREJIT_PLATFORM_FIGURES"):
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        write_figures(
            f"{name.lower()}_calls",
            {
                **facts(server.package.replace("py", "nvidia-py", 1), "jax", "numpy"),
                **before,
                "calls": CALLS,
                "milliseconds of Bundle.call, median": round(medians["call"] * 1e3, 2),
                "milliseconds by the server, median": round(medians["server"] * 1e3, 2),
                "ratio": round(medians["server"] / medians["call"], 3),
            },
        )
