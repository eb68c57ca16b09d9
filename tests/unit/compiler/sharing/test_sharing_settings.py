"""The file of shared stores: mistakes are named, and nothing is loosened by one."""

import pytest
from tests.signers import private_pem, signer

from prejit.compiler.sharing.sharing_settings import STORE, read_stores, written_address
from prejit.runtime.errors import PolicyError, StoreError, UsageError


def write(directory, text):
    (directory / "key.pem").write_bytes(private_pem("a"))
    (directory / "key.pub.pem").write_text(signer("a").public.pem)
    (directory / "stores.toml").write_text(text)
    return str(directory / "stores.toml")


def test_stores_are_read_from_a_url_or_a_file(tmp_path, monkeypatch):
    monkeypatch.delenv(STORE, raising=False)
    assert not read_stores(None).tiers
    (tier,) = read_stores("http://127.0.0.1:9/x").tiers
    assert (tier.remote.name, tier.writes, tier.believed) == ("http://127.0.0.1:9/x", True, ())
    monkeypatch.setenv(STORE, str(tmp_path / "a b"))
    (tier,) = read_stores(None).tiers
    assert tier.remote.name == (tmp_path / "a b").as_uri()
    assert written_address(None) == str(tmp_path / "a b")
    text = """
namespace = "branch"
[[store]]
url = "http://127.0.0.1:9"
read = ["branch", "release"]
write = true
keys = ["key.pub.pem"]
sign = "key.pem"
[[store]]
url = "oci://127.0.0.1:9/x"
"""
    found = read_stores(write(tmp_path, text))
    assert written_address(str(tmp_path / "stores.toml")) == "http://127.0.0.1:9"
    with pytest.raises(UsageError, match="expected a store with write = true for a cluster"):
        written_address(write(tmp_path, text.replace("write = true", "")))
    assert found.namespace == "branch"
    said = [(e.namespace, e.writes, e.signer is not None, len(e.believed)) for e in found.tiers]
    of_other = ("release", False, False, 1)  # nobody writes into another namespace
    assert said == [("branch", True, True, 1), of_other, ("branch", False, False, 0)]


STORE_TABLE = '[[store]]\nurl = "http://x"\n'
WRONG = {
    "no TOML": ("[[store", UsageError, "expected TOML"),
    "no store": ('namespace = "x"', UsageError, r"expected a table \[\[store\]\]"),
    "no url": ("[[store]]\nwrite = true", UsageError, "store 1: expected url"),
    "unknown key": (f'{STORE_TABLE}key = "a"', UsageError, "store 1: key: expected one"),
    "key missing": (f'{STORE_TABLE}keys = ["no.pem"]', StoreError, "no.pem: cannot read"),
    "private": (f'{STORE_TABLE}keys = ["key.pem"]', PolicyError, "found a private one"),
    "nobody writes": (f'{STORE_TABLE}sign = "key.pem"', UsageError, "sign: expected write = true"),
    "no repository": ('[[store]]\nurl = "oci://host"', UsageError, "1: url: .*a host and a path"),
    "query": ('[[store]]\nurl = "https://x?a=b"', UsageError, "store 1: url: https://x: .*a query"),
}


def test_a_mistake_names_the_file_and_the_key(tmp_path, monkeypatch):
    for text, kind, reason in WRONG.values():
        with pytest.raises(kind, match=reason) as raised:
            read_stores(write(tmp_path, text))
        if kind is UsageError:
            assert "stores.toml" in str(raised.value)
    (tmp_path / "stores.toml").unlink()
    with pytest.raises(StoreError, match="cannot read it"):
        read_stores(str(tmp_path / "stores.toml"))
    monkeypatch.setenv(STORE, "oci://host")
    with pytest.raises(UsageError, match=f"{STORE}: .*a host and a path"):
        read_stores(None)
