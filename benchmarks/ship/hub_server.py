"""A hub of one repository, as huggingface_hub asks it: names of files, and redirects to where they are.

    python -m benchmarks.ship.hub_server PORT DIRECTORY URL

DIRECTORY has the repository's files. A web server has them too, below URL, as a hub's CDN does.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from benchmarks.harness.workload import VOCABULARY

REPOSITORY = "bench/gpt2"
COMMIT = "0" * 40


def make_repository(directory: Path, weights: Path, config: Path) -> None:
    """Make a repository of links to GPT-2's weights and config, with a tokenizer of its size."""
    directory.mkdir()
    (directory / "model.safetensors").symlink_to(weights)
    (directory / "config.json").symlink_to(config)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(first, second) for first in alphabet for second in alphabet]
    merges = pairs[: VOCABULARY - len(alphabet) - 1]
    names = [*alphabet, *("".join(pair) for pair in merges), "<|endoftext|>"]
    tokenizer = Tokenizer(BPE({name: place for place, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


def serve(port: int, directory: Path, url: str) -> None:
    """Serve a repository on a port of 127.0.0.1, until the process is killed."""
    files = {file.name: file.stat().st_size for file in directory.iterdir()}

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            if self.path.startswith(f"/api/models/{REPOSITORY}/revision/"):
                siblings = [{"rfilename": each} for each in files]
                self.answer(200, {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings})
            elif self.path.startswith(f"/api/models/{REPOSITORY}/tree/"):
                self.answer(
                    200,
                    [
                        {"type": "file", "path": each, "size": size, "oid": f"{place:040x}"}
                        for place, (each, size) in enumerate(files.items())
                    ],
                )
            elif self.path.startswith(f"/{REPOSITORY}/resolve/") and name in files:
                linked = {
                    "X-Repo-Commit": COMMIT,
                    "X-Linked-Etag": f'"{name}"',
                    "X-Linked-Size": str(files[name]),
                    "Location": f"{url}/{name}",
                }
                self.answer(302, None, linked)
            else:
                self.answer(404, {"error": "not found"})

        do_HEAD = do_GET

        def answer(self, status: int, plain: Any, headers: dict[str, str] | None = None) -> None:
            content = b"" if plain is None else json.dumps(plain).encode()
            self.send_response(status)
            for key, value in {**(headers or {}), "Content-Type": "application/json"}.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Hub).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
