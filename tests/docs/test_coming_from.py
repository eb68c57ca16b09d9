"""Each command of docs/coming-from.md that starts a server starts it, and the paths beside it answer."""

import re
import shlex

import httpx
import pytest
from tests.extent import one_in
from tests.integration.test_serve import Process

from .snippets import ROOT, commands_of, snippets_of

PAGE = ROOT / "docs" / "coming-from.md"
ENCODER = ROOT / "docs" / "how-to" / "encode.md"
COMMANDS = [
    command
    for snippet in snippets_of(PAGE)
    if snippet.language == "sh"
    for command in commands_of(snippet)
    if command.startswith("prejit serve ")
]
assert len(COMMANDS) == 3, "a page whose form has changed would be tried no more"
KEY = "sk-demo-0123456789abcdef"


@pytest.mark.parametrize("command", one_in(3, COMMANDS))
def test_a_server_takes_the_place_of_another_tool(command, page_directory, shell):
    (page_directory / "keys.txt").write_text(f"{KEY}\n")
    if "encoder" in command:
        [manifest] = [each.code for each in snippets_of(ENCODER) if each.title == "encoder.toml"]
        (page_directory / "encoder.toml").write_text(manifest)
        done = shell("prejit build encoder.toml --no-measure", page_directory)
        assert done.returncode == 0, done.stderr
    words = shlex.split(re.sub(r" --port \d+", "", command))[2:]
    server = Process(*words)
    try:
        server.wait_until_ready()
        client = httpx.Client(
            base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
        )
        [model] = client.get("/v1/models").raise_for_status().json()["data"]
        assert model["id"] == ("assistant" if "assistant=" in command else words[0].split("/")[-1])
        if "encoder" in command:
            body = {"model": model["id"], "input": "a " * 100}
            assert client.post("/v1/embeddings", json=body).status_code == 400
            cut = client.post("/v1/embeddings", json=body | {"truncate_prompt_tokens": -1})
            assert len(cut.raise_for_status().json()["data"]) == 1
        else:
            body = {"model": model["id"], "prompt": "def main(", "max_tokens": 4}
            found = client.post("/v1/completions", json=body).raise_for_status().json()
            assert found["usage"]["completion_tokens"] == 4
            tokens = client.post("/tokenize", json={"model": model["id"], "prompt": "def"})
            assert tokens.raise_for_status().json()["count"] > 0
        client.get("/health").raise_for_status()
        assert "vllm:" in client.get("/metrics").raise_for_status().text
        if "--keys" in command:
            assert httpx.get(f"{server.url}/v1/models").status_code == 401
        client.close()
        assert server.end() == 0
    finally:
        server.kill()
