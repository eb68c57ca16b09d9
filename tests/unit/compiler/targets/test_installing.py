"""uv installs what pip would: with its settings, or not at all."""

from pathlib import Path

from prejit.compiler.targets.installing import install_command, translated


def test_uv_gets_pips_settings_in_their_order_and_what_a_machine_needs(tmp_path, monkeypatch):
    def environ(listed, **own):
        return translated(listed, own).environ

    found = environ("""
:env:.find-links='https://c.example https://d.example'
global.find-links='https://a.example'
global.index-url='https://global.example'
install.index-url='https://install.example'
download.index-url='https://another-command.example'
""")
    assert found["UV_FIND_LINKS"] == "https://c.example,https://d.example"
    assert found["UV_DEFAULT_INDEX"] == "https://install.example"
    found = environ("global.extra-index-url='file:///one\\nfile:///two'\n")
    assert found["UV_EXTRA_INDEX_URL"] == "file:///one file:///two"
    assert found["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    own = environ("global.index-url='https://pip.example'\n", UV_DEFAULT_INDEX="https://uv")
    assert own["UV_DEFAULT_INDEX"] == "https://uv", "uv's own variables win"
    found = translated("global.index-url='https://me:secret@packages.example/simple'\n", {})
    command = install_command("uv", Path("/env/bin/python"), Path("/env/constraints.txt"), found)
    assert found.environ["UV_DEFAULT_INDEX"] == "https://me:secret@packages.example/simple"
    assert "secret" not in " ".join(command)
    found = environ(f"""
global.cert='{tmp_path}/ca.pem'
global.proxy='proxy.example:3128'
global.trusted-host='one.example two.example:8080'
global.timeout='5'
""")
    assert found["SSL_CERT_FILE"] == f"{tmp_path}/ca.pem"
    assert found["HTTPS_PROXY"] == "http://proxy.example:3128"
    assert found["UV_INSECURE_HOST"] == "one.example two.example:8080"
    for refused in ("require-hashes='1'", f"cert='{tmp_path}'", "find-links='https://x/a,b'"):
        assert translated(f"global.{refused}\n", {}) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "limits.txt").touch()
    listed = "global.constraint='limits.txt'\n:env:.find-links='wheels'\n:env:.no-index='1'\n"
    found = translated(listed, {})
    assert found.environ["UV_FIND_LINKS"] == str(tmp_path / "wheels")
    assert found.options == (f"--constraint={tmp_path}/limits.txt", "--no-index")
    assert translated(":env:.no-index='0'\n", {}).options == ()
