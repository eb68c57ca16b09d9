"""An HTTP handler in plain JAX, the demo model, greedy, one request at a time.

    python -m benchmarks.peers.jax_handler CHECKPOINT PORT

It is jax_baseline.py with the demo model's sizes. JAX_COMPILATION_CACHE_DIR is its compilation cache.
"""

from __future__ import annotations

import json
import struct
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.harness import workload


def main(checkpoint: str, port: str) -> None:
    """Load the checkpoint of a GPT-2, and answer `{"prompt": ..., "max_tokens": ...}`."""
    config = json.loads(Path(checkpoint, "config.json").read_bytes())
    workload.LAYERS, workload.WIDTH = config["n_layer"], config["n_embd"]
    workload.HEADS, workload.HEAD_SIZE = config["n_head"], config["n_embd"] // config["n_head"]
    import jax.numpy as jnp

    from benchmarks.peers import jax_baseline  # after the sizes, which it takes at its import

    weights = {}
    for name, value in read_safetensors(Path(checkpoint, "model.safetensors")).items():
        turned = value.T if value.ndim == 2 and ".h." in name else value  # (out, in)
        weights[name.removeprefix("transformer.")] = jnp.asarray(turned)
    tokenizer = Tokenizer.from_file(str(Path(checkpoint, "tokenizer.json")))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            prompt = tokenizer.encode(asked["prompt"]).ids
            tokens = list(jax_baseline.generate(weights, [prompt], asked["max_tokens"]))
            body = json.dumps({"choices": [{"text": tokenizer.decode(tokens)}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the float32 tensors of a file."""
    content = path.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(content[8 + size :][slice(*entry["data_offsets"])], np.float32).reshape(
            entry["shape"]
        )
        for name, entry in header.items()
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
