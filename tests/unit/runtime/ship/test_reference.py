"""A reference means one thing and prints as it was written. A wrong one is refused, and the form is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prejit.runtime.errors import UsageError
from prejit.runtime.ship.reference import Reference, parse_reference

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("oci://host/a/b:v1", ("oci", "oci://host/a/b", "v1", "")),
        (f"oci://host/a@{DIGEST}", ("oci", "oci://host/a", "", DIGEST)),
        (f"oci://[::1]:5000/a:b@{DIGEST}", ("oci", "oci://[::1]:5000/a", "b", DIGEST)),
        ("s3://bucket/a/b:v1.2", ("s3", "s3://bucket/a/b", "v1.2", "")),
        ("https://host:8443/models/demo", ("https", "https://host:8443/models/demo", "", "")),
        ("https://host:8443", ("https", "https://host:8443", "", "")),
        ("artifacts/demo", ("dir", "artifacts/demo", "", "")),
    ],
)
def test_what_a_reference_means(text, expected):
    found = parse_reference(text)
    assert (found.scheme, found.place, found.tag, found.digest) == expected
    assert parse_reference(str(found)) == found


def test_a_wrong_reference_is_refused_and_a_password_is_not_printed():
    for text, said in (
        ("", "empty"),
        ("ftp://host/a", "found ftp://"),
        ("oci:/host/a:v1", "^oci://host/a:v1: expected oci://, found oci:\n"),
        ("s3:bucket/a", "found s3:\n"),
        ("oci://host", "a host and a path"),
        ("oci://host/A", "lower-case"),
        ("oci://host/a:-x", "a tag of up to"),
        ("oci://host/a@sha256:abc", "64 digits of 0-9a-f"),
        ("oci://host/a?ns=b", r"^oci://host/a: .* behind a '\?'"),
        ("https://host/a#b:c", "^https://host/a: .* behind a '#'"),
    ):
        with pytest.raises(UsageError, match=said):
            parse_reference(text)
    assert str(parse_reference("https://me:secret@host/a")) == "https://host/a"
    me = "me:secret@host"
    for text in (
        f"ftp://{me}/a",
        f"https:/{me}/a",
        f"oci://{me}",
        f"https://{me}/a:-x",
        "az://b/a?sig=secret",
    ):
        with pytest.raises(UsageError) as raised:
            parse_reference(text)
        assert "secret" not in f"{raised.value} {raised.value.hint}"


@given(
    st.from_regex(r"[a-z0-9]{1,9}(/[a-z0-9]{1,5}){0,3}", fullmatch=True),
    st.from_regex(r"([A-Za-z0-9_][A-Za-z0-9._-]{0,9})?", fullmatch=True),
    st.booleans(),
)
def test_what_is_printed_is_read_back(path, tag, has_digest):
    at = Reference("s3", f"s3://bucket/{path}", tag, DIGEST if has_digest else "")
    assert parse_reference(str(at)) == at
