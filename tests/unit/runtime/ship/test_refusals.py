"""What a registry, a bucket or a web server refuses is an error in words, with the next step."""

import contextlib
import json
import time

import pytest
from tests.fake_registry import fake_registry
from tests.ports import free_port
from tests.store_servers import google_settings
from tests.unit.compiler.sharing.fixtures import S3_SETTINGS, http_store, s3_store

from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import RejectError, StoreError, UsageError
from prejit.runtime.ship import registry_repository, repository
from prejit.runtime.ship.mounted_forms import IMAGE
from prejit.runtime.ship.object_repository import ObjectRepository, open_objects
from prejit.runtime.ship.reference import parse_reference
from prejit.runtime.ship.registry_client import certificate_hint

from .conftest import GOLDEN, answering, audited, moved, place_at


def push(place):
    with pytest.raises((StoreError, UsageError)) as raised:
        moved(GOLDEN / "call", place)
    return f"{raised.value} {raised.value.hint}"


@pytest.fixture
def use(monkeypatch):
    def use(settings):
        for name, value in settings.items():
            monkeypatch.setenv(name, value)

    return use


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "RequestTimeTooSkewed", "clock"),
        (403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY: the store does not know"),
        (400, "AuthorizationHeaderMalformed", "AWS_REGION"),
        (413, "EntityTooLarge", "of this size"),
    ],
)
def test_a_bucket(status, code, said, use):
    def refuse(handler):
        found = 404 if handler.command == "HEAD" else status
        handler.reply(found, f"<Error><Code>{code}</Code></Error>".encode())

    with answering(refuse) as host:
        use(S3_SETTINGS | {"AWS_ENDPOINT": f"http://{host}"})
        assert said in push("s3://bucket/call:v1")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ((429, {"retry_after": "0"}), "wait 0 s: the registry limits how often"),
        ((429, {"retry_after": "Wed, 25 Nov 2026 00:00:00 GMT"}), "wait 0 s: the registry limits"),
        (405, "push to the registry that it mirrors"),
        (413, "takes no blobs of this size"),
        (500, "try again"),
    ],
)
def test_a_registry(fault, said):
    with fake_registry(fault=lambda method, path: fault if method == "POST" else None) as found:
        assert said in push(f"oci://{found.host}/call:v1")


def drip(handler, content, start):
    """Send an answer so slowly that nobody would wait for its end, and never pause."""
    handler.send_response(206 if start else 200)
    handler.send_header("content-length", str(len(content) - start))
    handler.end_headers()
    with contextlib.suppress(OSError):  # the client has gone
        for place in range(start, min(len(content), start + 100)):
            handler.wfile.write(content[place : place + 1])
            time.sleep(0.05)


@pytest.mark.parametrize("part", ["/manifests/v1", "/blobs/", "/manifests/sha256"])
def test_a_registry_that_sends_a_byte_now_and_then(part, tmp_path, monkeypatch):
    monkeypatch.setattr(repository, "WINDOW_SECONDS", 0.2)

    def fault(method, path):
        return drip if method == "GET" and part in path else None

    with fake_registry() as found:
        moved(GOLDEN / "call", f"oci://{found.host}/call:v1")
        found.fault = fault
        with pytest.raises(StoreError, match=r"expected at least 60 KiB in 0 s, found \d+ bytes"):
            moved(f"oci://{found.host}/call:v1", tmp_path / "back")


def test_a_web_server_that_sends_a_byte_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(repository, "WINDOW_SECONDS", 0.2)

    def reply(handler):
        content = GOLDEN.joinpath("call", handler.path.removeprefix("/call/")).read_bytes()
        if "/blobs/" in handler.path:
            drip(handler, content, 0)
        else:
            handler.reply(200, content)

    with answering(reply) as host, pytest.raises(StoreError, match="expected at least 60 KiB"):
        moved(f"http://{host}/call", tmp_path / "back")


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ({}, "expected at most 3 pages of tags, found one more"),
        ({"circle": True}, "pages of tags form a circle: /v2/demo/tags/list"),
        ({"tags": [f"v{number}" for number in range(9)]}, "expected at most 20 tags, found more"),
        ({"tags": ["v" * 5000]}, "expected at most 4096 bytes, found more"),
        ({"tags": {"v1": 1}}, "expected a list of tags, found"),
        ({"tags": [1]}, "expected a list of tags, found"),
    ],
)
def test_an_endless_list_of_tags_or_none(page, said, monkeypatch):
    monkeypatch.setattr(registry_repository, "_MOST_PAGES", 3)
    monkeypatch.setattr(registry_repository, "_MOST_PAGE_BYTES", 4096)
    monkeypatch.setattr(repository, "MOST_TAGS", 20)
    asked = []

    def next_page(handler):
        asked.append(handler.path)
        link = f'</v2/demo/tags/list?last={0 if page.get("circle") else len(asked)}>; rel="next"'
        more = {"link": link} if len(asked) < 50 else {}  # else it would take for ever
        handler.reply(200, json.dumps(page).encode(), **more)

    with answering(next_page) as host, pytest.raises((StoreError, RejectError), match=said):
        place_at(f"oci://{host}/demo").tags()
    assert len(asked) <= 3


def test_a_server_that_does_not_answer_or_takes_no_chunks():
    objects = ObjectRepository(parse_reference(f"http://127.0.0.1:{free_port()}/demo"))
    objects._objects = open_objects(objects._url, answer_seconds=1.0, retries=False)
    with pytest.raises(StoreError, match=r"\(Connection refused\)\n"):
        objects.open("", "")
    closed = f"127.0.0.1:{free_port()}"
    at = f"oci://{closed}/demo: manifests/latest"
    with pytest.raises(StoreError, match=rf"^{at}: ConnectionError: Connection refused\n"):
        moved(f"oci://{closed}/demo", GOLDEN / "none")
    with fake_registry(fault=lambda method, path: 405 if method == "PATCH" else None) as found:
        moved(GOLDEN / "call", f"oci://{found.host}/call")
        assert found.count("PATCH", "") == 0
        assert all(digest_of(content) == at for (_, at), content in found.blobs.items())


@pytest.mark.parametrize(
    ("place", "settings", "said"),
    [
        ("gs://b/x", {"GOOGLE_APPLICATION_CREDENTIALS": "/none"}, "settings that reach its cloud"),
        ("az://b/x", {}, "settings that reach its cloud"),
        ("gs://b/x", google_settings("no URL"), "request must be valid"),
    ],
)
def test_wrong_settings_of_a_cloud(place, settings, said, use):
    use(settings)
    with pytest.raises((StoreError, UsageError), match=said):
        place_at(place).open("v1", "")


def test_a_certificate():
    for text, said in (
        ("certificate verify failed: unable to get local issuer certificate", "SSL_CERT_FILE"),
        ("invalid peer certificate: NotValidYet: not yet valid", "clock"),
        ("Hostname mismatch, certificate is not valid for 'x'", "by the name"),
    ):
        assert said in certificate_hint(text)


def test_a_web_server_that_takes_nothing_or_lacks_files_or_ranges(tmp_path):
    def static(handler):
        handler.reply(404 if handler.command in ("GET", "HEAD") else 405)

    with answering(static) as host:
        assert "takes no files: copy the directory" in push(f"http://{host}/call")
    files = {
        f"/{file.relative_to(GOLDEN)}": file.read_bytes()
        for file in (GOLDEN / "call").rglob("*")
        if file.is_file()
    }
    largest = max(files, key=lambda path: len(files[path]))
    half = tmp_path / "back" / ".partial" / largest.rpartition("/")[2]
    half.parent.mkdir(parents=True)
    half.write_bytes(files[largest][: len(files[largest]) // 2])
    with http_store(files, []) as web:
        moved(f"{web}/call", tmp_path / "back")
        with pytest.raises(StoreError, match="not found") as raised:
            place_at(f"{web}/demo").open("v1", "")
    assert "prejit ls" not in str(raised.value.hint)
    expected = audited(GOLDEN / "call")
    assert audited(tmp_path / "back") == expected


def test_a_file_in_place_of_a_directory_and_a_layout_of_an_image_are_named(tmp_path):
    file = tmp_path / "demo.txt"
    file.write_text("")
    assert "a file has this name" in push(file)
    moved(GOLDEN / "fleet", tmp_path / "image", form=IMAGE)
    with pytest.raises(RejectError, match="found none") as raised:
        audited(tmp_path / "image")
    assert "push --image" in str(raised.value.hint)


def test_the_last_tag_of_a_bucket_leaves_blobs_and_says_so(tmp_path, monkeypatch, use):
    expected = audited(GOLDEN / "fleet")
    with s3_store() as endpoint:
        use(S3_SETTINGS | {"AWS_ENDPOINT": endpoint})
        at = "s3://bucket/models/demo"
        for name, tag in (("call", "v1"), ("call", "stable"), ("fleet", "v2")):
            moved(GOLDEN / name, f"{at}:{tag}")
        place = place_at(at)
        with monkeypatch.context() as patch:
            patch.setattr(repository, "MOST_TAGS", 1)
            with pytest.raises(StoreError, match="expected at most 1 tags, found more"):
                place.tags()
        assert place.remove("stable") == 0
        files = [file for file in (GOLDEN / "call" / "blobs").rglob("*") if file.is_file()]
        assert 0 < place.remove("v1") <= sum(file.stat().st_size for file in files)
        moved(f"{at}:v2", tmp_path / "back")

        # A push that found the blobs of a tag which goes before its own is there.
        write, removed = ObjectRepository.publish, []

        def publish(place, shipment, tag):
            removed.append(place.remove("v2"))
            write(place, shipment, tag)

        monkeypatch.setattr(ObjectRepository, "publish", publish)
        moved(GOLDEN / "fleet", f"{at}:v3")
        assert removed[0] > 0
        moved(f"{at}:v3", tmp_path / "beside")
    for name in ("beside", "back"):
        assert audited(tmp_path / name) == expected
