"""What `prejit serve` reads from its command line."""

import pytest

from prejit.runtime import __main__
from prejit.runtime.errors import UsageError
from prejit.server.cli.serve_command import named_paths
from prejit.server.gate.server_settings import Settings
from prejit.server.http import server_process
from prejit.server.served.served_loading import BundleSource, EngineOptions


def test_a_bundle_may_have_another_name(tmp_path):
    strange = tmp_path / "a=b"
    strange.mkdir()
    given = ["artifacts/demo", "chat=artifacts/demo", str(strange), "v1.2-x=/a=b", "bad name=x"]
    assert named_paths(given) == [
        (None, "artifacts/demo"),
        ("chat", "artifacts/demo"),
        (None, str(strange)),  # a directory that is there is no name and path
        ("v1.2-x", "/a=b"),
        (None, "bad name=x"),
    ]
    with pytest.raises(UsageError, match="found 'a' twice"):
        named_paths(["a=x", "b=y", "a=z"])


@pytest.mark.parametrize(
    ("option", "values"),
    [
        *(("--port", "-1 65536 x"), ("--timeout", "nan -1"), ("--drain-seconds", "inf")),
        *((name, "0") for name in ("--max-body", "--max-tokens", "--clients", "--queue")),
        *(("--slots", "1.5 0"), ("--prefix-memory", f"-1 1.5X {'9' * 16}")),
        *(("--check-seconds", "often"), ("--follow", "0 often")),
        ("--admin", "8001 http://127.0.0.1:8001 localhost:99999 localhost"),
        ("--cors", "app.example https://a.b/"),
    ],
)
def test_a_limit_that_is_none_is_refused(option, values, ran):
    for value in values.split():
        error = ran("serve", "artifacts/demo", option, value, status=2).err
        assert error.startswith(f"error[usage]: Invalid value for '{option}': ")
        assert value in error


FIXED = f"oci://host.example/demo@sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ("x --adapter a", 2, "expected NAME=DIR, found 'a'"),
        ("x y --adapter a=d", 2, "expected MODEL:NAME=DIR, found 'a=d'"),
        ("m=x y --adapter n:a=d", 2, "a bundle that is given as n=BUNDLE, found 'n:a=d' beside m="),
        ("x --adapter m:a=d", 2, "a bundle that is given as m=BUNDLE, found 'm:a=d'\n"),
        ("a=x b=y --canary z", 2, "expected one bundle, found 2; start canaries of"),
        ("x --canary z --share 5", 2, 'share: expected a share such as "5%"'),
        (f"{FIXED} --follow 60", 2, "expected a directory or a tag, such as oci://"),
        ("x --keys missing/file", 6, "cannot read the keys"),
        ("x --log missing/file", 6, "cannot write the log"),
    ],
)
def test_options_that_do_not_fit_and_files_that_cannot_be_opened_are_said(
    given, status, said, ran, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert said in ran("serve", *given.split(), status=status).err


def test_every_option_reaches_the_server(monkeypatch):
    given = []
    monkeypatch.setattr(server_process, "serve", lambda *arguments: given.append(arguments))
    text = (
        "--host 0.0.0.0 --port 8080 --admin [::1]:9000 --cors https://A.b --slots 3 --queue 4 "
        "--prefix-memory 2M --clients 5 --memory 3G --timeout 0.5 --drain-seconds 6 --max-body 7K "
        "--max-tokens 8 --check-seconds 9 --on-mismatch error --ignore-unknown-fields "
        "--share-prefixes --check-finite"
    )
    assert __main__.main(["serve", "a=x", "y", *text.split()]) == 0
    settings = Settings(
        **{"body_bytes": 7 << 10, "max_tokens": 8, "timeout_seconds": 0.5, "clients": 5},
        **{"drain_seconds": 6, "check_seconds": 9, "ignore_unknown_fields": True},
        cors=("https://a.b",),
    )
    sources = [BundleSource("x", "a"), BundleSource("y")]
    flagged = {"must_match": True, "share_prefixes": True, "check_finite": True}
    engines = EngineOptions(3, 4, 2 << 20, memory=3 << 30, **flagged)
    assert given == [(sources, engines, settings, ("0.0.0.0", 8080), None, ("::1", 9000), None)]
    assert __main__.main(["serve", "y"]) == 0
    at = ("127.0.0.1", 8000)
    assert given[1] == ([BundleSource("y")], EngineOptions(), Settings(), at, None, None, None)
    assert __main__.main(["serve", "y", "--canary", "z", "--share", "2.5%"]) == 0
    assert given[2][-1] == ("z", 0.025)
    for bundle in ("oci://host.example/demo:prod", "directory"):
        assert __main__.main(["serve", f"a={bundle}", f"b={FIXED}", "--follow", "60"]) == 0
        assert given[-1][2].follow_seconds == 60
