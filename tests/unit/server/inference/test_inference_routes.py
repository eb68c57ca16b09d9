"""Clients of the protocol must get what `Bundle.call` gives, and errors that say what was wrong."""

import json
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from unittest.mock import Mock

import httpx
import hypothesis
import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from tests.extent import examples
from tests.unit.server.running import running, served, wait_for
from tritonclient.utils import InferenceServerException

from prejit.runtime import load
from prejit.runtime.errors import DeadlineError
from prejit.server.engine.engine import Engine
from prejit.server.gate.api_keys import Keys
from prejit.server.gate.server_settings import Settings
from prejit.server.inference.inference_models import InferenceModel, static_values
from prejit.server.served.served import Models

X = np.linspace(-1, 1, 2 * 16, dtype=np.float32).reshape(2, 16)


@pytest.fixture(scope="module")
def bundle(settled_dir, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREJIT_RUNTIME_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load(settled_dir)


@pytest.fixture(scope="module")
def server(bundle):
    models = Models(served(bundle))
    with running(models, Settings()) as found:
        yield found
    models.close()


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as found:
        yield found


def tensor(name, value, datatype, *, binary):
    found = triton.InferInput(name, list(value.shape), datatype)
    return found.set_data_from_numpy(value, binary_data=binary)


def test_static_values_that_python_calls_equal_are_listed_each(bundle):
    texts = ("1", "true", '"1"', "1", '["float","0x1.8000000000000p+0"]', '["tuple",[1,2]]')
    buckets = [replace(bundle.config.programs[0], static={"k": text}) for text in texts]
    assert [*map(repr, static_values(buckets)["k"])] == ["1", "True", "'1'", "1.5", "'(1, 2)'"]


def test_a_static_argument_may_have_the_name_of_a_parameter_of_the_protocol(bundle):
    bucket = replace(bundle.config.programs[0], static={"priority": "5"})
    with closing(served(bundle)) as one:
        model = InferenceModel(one, bucket.name, [bucket])
        given = {each.name: X for each in model.inputs}
        _, kwargs = model.arguments(given, {"priority": 5, "timeout": 9})
    assert (kwargs["priority"], "timeout" in kwargs) == (5, False)


def test_the_server_and_its_models_are_found(client):
    assert (client.is_server_live(), client.is_server_ready()) == (True, True)
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    for name in ("score", "example.score"):
        assert (client.is_model_ready(name), client.is_model_ready(name, "1")) == (True, True)
        found = client.get_model_metadata(name)
        assert found["name"] == name
        assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
        assert found["outputs"] == [{"name": "result", "datatype": "FP32", "shape": [-1, 4]}]
    inputs = client.get_model_metadata("nest")["inputs"]
    expected = {"tree.half": "BF16", "tree.pair.0": "INT32", "tree.pair.1": "BOOL"}
    assert {each["name"]: each["datatype"] for each in inputs} == expected
    assert not client.is_model_ready("nothing")
    assert not client.is_model_ready("score", "2")
    assert client.infer("score", [tensor("x", X, "FP32", binary=True)], model_version="1")
    assert client.infer("tick", []).as_numpy("result") == 7  # a program without arguments


@pytest.mark.parametrize(
    ("binary", "binary_out", "rows"), [(False, False, 2), (True, True, 8), (True, None, 2)]
)
def test_an_inference_is_what_a_call_gives(client, bundle, binary, binary_out, rows):
    x = np.random.default_rng(rows).standard_normal((rows, 16), np.float32)
    wanted = [triton.InferRequestedOutput("result", binary_data=bool(binary_out))]
    outputs = None if binary_out is None else wanted
    inputs = [tensor("x", x, "FP32", binary=binary)]
    found = client.infer("score", inputs, outputs=outputs, request_id="7")
    np.testing.assert_array_equal(found.as_numpy("result"), bundle.call("score", x=x))
    response = found.get_response()
    assert (response["id"], response["model_name"]) == ("7", "score")


def test_nested_trees_are_tensors_by_path(client, bundle):
    half = np.array([1, 2, 3], ml_dtypes.bfloat16)
    inputs = [
        tensor("tree.pair.1", np.array(True), "BOOL", binary=False),
        tensor("tree.half", half, "BF16", binary=True),
        tensor("tree.pair.0", np.array([[1, 2], [3, 4]], np.int32), "INT32", binary=False),
    ]
    found = client.infer("nest", inputs)
    np.testing.assert_array_equal(found.as_numpy("sums.0").astype(np.float32), [2, 4, 6])
    np.testing.assert_array_equal(found.as_numpy("sums.1"), [[2, 3], [4, 5]])
    assert found.as_numpy("scalar") == 2.5
    assert found.as_numpy("scalar").shape == ()
    wanted = [triton.InferRequestedOutput("sums.1"), triton.InferRequestedOutput("scalar", False)]
    found = client.infer("nest", inputs, outputs=wanted)
    assert [each["name"] for each in found.get_response()["outputs"]] == ["sums.1", "scalar"]
    assert found.as_numpy("sums.1").tolist() == [[2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("score", [("y", X, "FP32")], "found 'y', and 'x' missing"),
        ("score", [("x", X[0], "FP32")], "expected float32"),
        ("score", [("x", X[:, :3], "FP32")], "axis 1 of x: expected 16 in every bucket, found 3"),
        ("score", [("x", X[:0], "FP32")], "pass at least one row: axis 0 of x has none"),
        ("score", [("x", X.astype(np.float64), "FP64")], "expected FP32, found FP64"),
        ("score", [("x", np.array([b"a"], np.object_), "BYTES")], "found 'BYTES'"),
        ("nothing", [("x", X, "FP32")], "expected one of the models"),
    ],
)
def test_a_wrong_inference_is_an_error_that_names_it(client, name, inputs, message):
    for binary in (False, True):
        given = [tensor(*each, binary=binary) for each in inputs]
        with pytest.raises(InferenceServerException) as caught:
            client.infer(name, given)
        assert message in str(caught.value.message())
        assert caught.value.status() in ("400", "404")


def infer(server, content, headers=None):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    url = f"{server.url}/v2/models/score/infer"
    return httpx.post(url, content=body, headers=headers, timeout=60)


def of(**changed):
    plain = {"name": "x", "datatype": "FP32", "shape": [2, 16], "data": X.tolist()}
    return {"inputs": [plain | changed]}


WRONG_BODIES = [
    *(b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"inputs":{}}', b'{"inputs":[1]}'),
    *(of(shape=shape) for shape in ([-2, -16], [2.0, 16], ["2", 16], [2**70])),
    *(of(data=data) for data in ({}, [[1] * 16, [1] * 15])),
    *(of(name=1), of(datatype=None), of(parameters=[]), of(parameters={"binary_data_size": 128})),
    *(of(parameters={"binary_data_size": size}, data=None) for size in (-1, "128")),
    of(parameters={"shared_memory_region": "a"}, data=None),
    {"inputs": of()["inputs"] * 2},
    *({**of(), "outputs": given} for given in (1, [{"name": "other"}])),
    {**of(), "outputs": [{"name": "result", "parameters": {"classification": 2}}]},
    {**of(), "parameters": {"mode": "tanh"}},
    {**of(), "id": 7},
]


def test_a_wrong_body_is_400_and_says_so_in_the_form_of_the_protocol(server):
    for content in WRONG_BODIES:
        found = infer(server, content)
        assert found.status_code == 400, content
        assert found.json().keys() == {"error"}
    for length in ("-1", "x", "1e3", "99999999", "", "٣", "0"):
        headers = {"Inference-Header-Content-Length": length.encode()}
        assert infer(server, b"{}", headers).status_code == 400
    unknown = {**of(), "extra": {"a": 1}}  # the protocol wants such fields ignored
    assert infer(server, unknown).status_code == 200
    head = json.dumps(of(data=None, parameters={"binary_data_size": X.nbytes})).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    right = X.tobytes()
    for content, status in ((right, 200), (right + b"0", 400), (right[:-1], 400), (b"", 400)):
        assert infer(server, head + content, headers).status_code == status


def test_the_published_document_of_v2_holds(server):
    import schemathesis.checks

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    of = schemathesis.specs.openapi.checks
    wanted = (schemathesis.checks.not_a_server_error,)
    wanted += (of.status_code_conformance, of.response_schema_conformance)
    paths = list(schema.include(path_regex="^/v2").get_all_operations())
    assert len(paths) >= 6
    for operation in paths:

        @hypothesis.settings(
            max_examples=examples(5, 30),
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(operation.ok().as_strategy())
        def check(case):
            if case.path_parameters:
                case.path_parameters["model"] = "score"
            case.call_and_validate(checks=wanted)

        check()


def test_a_wrong_path_is_an_error_in_the_form_of_the_protocol(server):
    wrong = [("GET", "nothing", 404), ("GET", "models", 404), ("POST", "health/ready", 405)]
    wrong += [("GET", "models/score/infer", 405), ("POST", "models/score", 405)]
    for model in ("nothing", "score/versions/2"):
        ways = (("GET", ""), ("GET", "/ready"), ("POST", "/infer"))
        wrong += [(method, f"models/{model}{rest}", 404) for method, rest in ways]
    for method, path, status in wrong:
        found = httpx.request(method, f"{server.url}/v2/{path}", timeout=60)
        assert (found.status_code, found.json().keys()) == (status, {"error"}), path
    for name, near in (("scroe", "score"), ("example.nset", "example.nest")):
        found = httpx.get(f"{server.url}/v2/models/{name}")
        assert found.status_code == 404
        assert f"(did you mean '{near}'?)" in found.json()["error"]


def test_a_server_that_is_not_ready_says_so():
    with running(Models(), Settings()) as server:
        for path in ("/v2/health/ready", "/v2/models/score", "/v2/models/score/ready"):
            found = httpx.get(server.url + path, timeout=60)
            assert found.status_code == 503
            assert int(found.headers["retry-after"]) > 0
            assert found.json() in ({"ready": False}, {"error": "the server is loading"})
        assert httpx.get(f"{server.url}/v2/health/live", timeout=60).json() == {"live": True}


def test_a_client_that_leaves_cancels_its_call_and_a_late_one_is_504(bundle, monkeypatch):
    futures, models = [Future(), Future()], Models(served(bundle))
    begin = Mock(side_effect=futures)
    monkeypatch.setattr(Engine, "submit_client_call", begin)
    with running(models, Settings()) as server:
        with server.send("/v2/models/score/infer", of()):
            wait_for(lambda: begin.called)
            assert not futures[0].done()
        wait_for(futures[0].cancelled)
        wait_for(lambda: not server.requests())
    with running(models, Settings(timeout_seconds=0.1)) as server:
        found = infer(server, of())
        assert found.status_code == 504
        assert "expected a result within 0.1 seconds" in found.json()["error"]
        # The engine counts it as such: to cancel it would count as a client that left.
        assert isinstance(futures[1].exception(60), DeadlineError)
    models.close()


def test_a_call_is_of_the_named_bundle_and_of_its_keys_client(bundle, tmp_path, monkeypatch):
    (tmp_path / "keys.txt").write_text("few: sk-few-000 waiting=1\n")
    models = Models(one := served(bundle, "one"), other := served(bundle, "other"))
    key = {"Authorization": "Bearer sk-few-000"}
    for engine in (one.engine, other.engine):
        begin = Mock(side_effect=engine.submit_client_call)
        monkeypatch.setattr(engine, "submit_client_call", begin)
    with running(models, Settings(keys=Keys(tmp_path / "keys.txt"))) as server:
        assert infer(server, of(), key).status_code == 404  # which bundle's is not clear
        url = f"{server.url}/v2/models/other.score/infer"
        assert httpx.post(url, json=of(), headers=key, timeout=60).status_code == 200
    models.close()
    assert not one.engine.submit_client_call.called
    client, limits, _ = other.engine.submit_client_call.call_args.args
    assert (client, limits.waiting) == ("few", 1)
