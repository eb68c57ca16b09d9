"""Options that do not fit are said before any request is sent."""

import pytest

NOWHERE = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("options", "said", "status"),
    [
        (("--rate", "log"), "--rate log: expected a log, found none", 2),
        (("--rate", "0"), "'--rate'", 2),
        (("--rate", "1e-9"), "--rate 1e-09: expected 2 to 1,000,000 requests in a window of", 2),
        (("--rate", "1e6", "--seconds", "9"), "window of 9 s, found 9e+06", 2),
        (("--whole", "--first-token-ms", "9"), "--first-token-ms: expected streamed answers", 2),
        (("--prompt-tokens", "9..3"), "N or LEAST..MOST, such as 16..256, found '9..3'", 2),
        (("--new-tokens", "few"), "N or LEAST..MOST, such as 16..256, found 'few'", 2),
        (("--api", "infer"), "--api infer: expected the name of a function in --model", 2),
        (("--log", "none.jsonl"), "none.jsonl: cannot read the log", 6),
        (("--key-file", "none"), "none: cannot read the key", 6),
        ((), "cannot connect: Connection refused", 7),
    ],
)
def test_a_mistake_is_said(options, said, status, ran):
    assert said in ran("load", NOWHERE, *options, status=status).err


@pytest.mark.parametrize(
    ("url", "status"),
    [
        *(("http://user:se%40cret@", 2), ("http://user:secret@host:99999", 2)),
        *(("http://user:se%/ret@host", 2), ("http://user:sec@ret@host?x=1", 2)),
        ("http://user:secret@127.0.0.1:1", 7),
    ],
)
def test_a_url_of_no_server_and_a_wrong_key_are_said_without_them(url, status, tmp_path, ran):
    said = ran("load", url, status=status).err
    assert ("expected a " in said) == (status == 2)
    assert "http://" in said
    for part in ("user", "se%", "secret", "ret@"):
        assert part not in said
    (tmp_path / "key").write_text("two words\n")
    found = ran("load", NOWHERE, "--key-file", tmp_path / "key", status=2).err
    assert "key: expected a key alone, found 2 words" in found
    assert "two words" not in found
