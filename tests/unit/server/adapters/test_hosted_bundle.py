"""A bundle inside a server of others: the program by its tensors, and the application of `prejit serve`."""

import numpy as np
import pytest
from starlette.testclient import TestClient

from prejit.runtime import ClosedError, UsageError, load
from prejit.server.adapters.hosted_bundle import HostedProgram, load_models, make_bundle_app
from prejit.server.inference.inference_models import results

X = np.linspace(-1, 1, 2 * 16, dtype=np.float32).reshape(2, 16)


def test_a_program_runs_by_the_names_of_its_tensors(bundle_dir):
    program = HostedProgram(str(bundle_dir), "score", "error")
    [takes] = program.inputs
    assert (takes.name, takes.datatype, takes.shape) == ("x", "FP32", [-1, 16])
    [(name, found)] = results(program.submit({"x": X}, {}).result()).items()
    with load(bundle_dir) as bundle:
        np.testing.assert_array_equal(found, bundle.call("score", x=X))
    assert [each.name for each in program.outputs] == [name]
    with pytest.raises(UsageError, match="expected 'x' for 'score', found 'y'"):
        program.submit({"y": X}, {})
    with pytest.raises(UsageError, match="static arguments of 'score'"):
        program.submit({"x": X}, {"speed": 3})
    program.close()
    with pytest.raises(ClosedError):
        program.submit({"x": X}, {})
    with pytest.raises(UsageError, match=r"one \[\[program\]\], found nest, score, tick") as error:
        HostedProgram(str(bundle_dir))
    assert "`program`" in (error.value.hint or "")


def test_the_application_answers_without_a_server_of_ours(bundle_dir):
    models = load_models(str(bundle_dir), name="ranker", on_mismatch="error")
    given = {"name": "x", "datatype": "FP32", "shape": [2, 16], "data": X.ravel().tolist()}

    client = TestClient(make_bundle_app(models))
    assert client.get("/health/ready").json() == {"state": "ready", "models": ["ranker"]}
    inferred = client.post("/v2/models/ranker.score/infer", json={"inputs": [given]})
    with load(bundle_dir) as bundle:
        expected = bundle.call("score", x=X).ravel()
    np.testing.assert_allclose(inferred.json()["outputs"][0]["data"], expected, rtol=1e-6)
    for served in models:
        served.close()
        served.bundle.close()
