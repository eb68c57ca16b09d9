"""Check in a separate process that a model's tokenizer.json works as a server uses it.

The file is a program from outside: regular expressions, tables and templates that the `tokenizers` library
runs. It may fail on some texts only, panic, or never end. A build refuses such a file, because a bundle with
it would load and then fail on its first text.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

from prejit.runtime.base.child_process import run_child
from prejit.runtime.errors import CheckpointError, PrejitError

_PROBES = {
    "an empty text": "",
    "an English text": "Hello, world! The quick brown fox jumps over the lazy dog.",
    "all characters of ASCII": "".join(map(chr, range(128))),
    "40 times the letter a": "a" * 40,
    "accents": "Éàüñ ç ø Å e\u0301 a\u0308",
    "emoji": "😀👍🏽👩‍👩‍👧 🇨🇭",
    "Chinese, Japanese and Korean": "你好。世界 こんにちは 안녕하세요",
    "white space": " \t\n\r\n  \u00a0\u200b\u3000 \n\n",
    "2 kB of mixed text": 'def f(x):\n    return {"é": x ** 2, "你": [1.5e-3, "😀"]}  # ok?\n' * 30,
}
"""Texts of many kinds. The tokenizer of a published model accepts any text."""
_CPU_SECONDS = 5
"""CPU time limit of the process for files up to 4 MB: a hundred times what it needs."""
_BYTES_A_SECOND = 4 << 20
"""Bytes of a larger file for which the limit grows by a second."""
_WALL_SECONDS = 30
_MEMORY_BYTES = 8 << 30
_DECODED_AT_ONCE = 256
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from prejit.compiler.checkpoint.tokenizer_check import _main; _main(*sys.argv[2:])"
)


def check_tokenizer(path: Path, content: bytes, vocab_size: int) -> None:
    """Load a tokenizer and encode and decode a set of texts, within limits of time and memory.

    `path` is the file, for errors, and `vocab_size` the number of tokens of the model.

    Raises:
        CheckpointError: the library cannot read the file, fails on a text, or does not end, or a text has a
            token that the model does not have.
    """
    seconds = _CPU_SECONDS + len(content) // _BYTES_A_SECOND
    arguments = (json.dumps(sys.path), str(path), *map(str, (vocab_size, seconds, _MEMORY_BYTES)))
    try:
        status, output, _ = run_child(
            [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, *arguments],
            content,
            # Each thread would reserve memory, which is limited.
            env={**os.environ, "RUST_BACKTRACE": "0", "RAYON_NUM_THREADS": "1"},
            seconds=_WALL_SECONDS + seconds,
        )
    except OSError as error:
        raise CheckpointError(f"cannot start {sys.executable}: {error.strerror}") from error
    lines = output.decode("utf-8", "replace").splitlines()
    if status == 0 and lines:
        problem: str | None = json.loads(lines[-1])
        if problem is None:
            return
    else:
        doing = lines[-1] if lines else "starting"
        how = f"exit status {status}"
        if status is None or status in (-signal.SIGXCPU, -signal.SIGKILL):
            how = f"no end after {seconds} s"
        elif status < 0:
            how = f"a crash with signal {-status}"
        problem = f"{path}: expected a tokenizer that takes any text, found {how} while {doing}"
    raise CheckpointError(
        problem,
        hint="mend or replace the file: a bundle that holds it would fail where it runs. Without it, "
        "prompts are token ids",
    )


def _main(path: str, vocab_size: str, seconds: str, memory_bytes: str) -> None:
    """Print each step, and at the end the problem or null as JSON."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    problem = _problem(sys.stdin.buffer.read(), path, int(vocab_size))
    print(json.dumps(problem), flush=True)


def _problem(content: bytes, path: str, vocab_size: int) -> str | None:
    from prejit.runtime.text.tokenizer import Tokenizer  # only this process needs the library

    doing = "reading it"
    try:
        print(doing, flush=True)
        tokenizer = Tokenizer(content, path)
        # Tokens that were added do not count: some published models have no embedding for them.
        largest = max(tokenizer.library.get_vocab(with_added_tokens=False).values(), default=-1)
        if largest >= vocab_size:
            return (
                f"{path}: expected token ids of 0 to {vocab_size - 1}, which the model has; found "
                f"{largest}"
            )
        for name, text in _PROBES.items():
            doing = f"encoding {name}"
            print(doing, flush=True)
            for special in (False, True):
                ids = tokenizer.encode(text, add_special_tokens=special)
                if tokenizer.encode_batch([text], add_special_tokens=special) != [ids]:
                    return f"{path}: expected the same tokens each time, found others while {doing}"
            if max(ids, default=0) >= vocab_size:
                return (
                    f"{path}: expected token ids of 0 to {vocab_size - 1}, which the model has; found "
                    f"{max(ids)} while {doing}"
                )
            if text.isascii() and text and not ids:
                return f"{path}: expected at least one token, found none while {doing}"
            doing = f"decoding the tokens of {name}"
            print(doing, flush=True)
            tokenizer.decode(ids)
            stream = tokenizer.stream(ids[:1])
            for token_id in ids[1:]:
                stream.push(token_id)
            stream.finish()
        doing = "decoding all tokens"
        print(doing, flush=True)
        for first in range(0, vocab_size, _DECODED_AT_ONCE):
            tokenizer.decode(range(first, min(first + _DECODED_AT_ONCE, vocab_size)))
    except PrejitError as error:
        said = f"{error}"
        return said if said.startswith(f"{path}: ") else f"{path}: {doing}: {said}"
    return None
