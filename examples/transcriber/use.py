"""Write the keys of a telephone call, each as soon as it is known: of a .wav file, or of a made-up call."""

import sys
import wave
from collections.abc import Callable
from typing import Any

import numpy as np
from tones import RATE, SECONDS, dial


def run(call: Callable[..., Any], generate: Callable[..., Any]) -> Any:
    """Return the tokens of a made-up call, int32 [6]."""
    return np.array(generate(source=call("mel", made_up())).token_ids, np.int32)


def made_up() -> np.ndarray:
    """Return the sound of a call, float32 [32000]."""
    return dial("3141#6", np.random.default_rng(0)).sound


def read(path: str) -> np.ndarray:
    """Return the first two seconds of a .wav file, float32 [32000], zeros after a shorter sound."""
    with wave.open(path) as file:
        found = (file.getframerate(), file.getnchannels(), file.getsampwidth())
        if found != (RATE, 1, 2):
            sys.exit(f"{path}: expected 16000 samples a second, 1 channel, 2 bytes; found {found}")
        samples = np.frombuffer(file.readframes(RATE * SECONDS), "<i2")
    return np.pad(samples / np.float32(2**15), (0, RATE * SECONDS - len(samples)))


if __name__ == "__main__":
    from prejit.runtime import load

    bundle = load(sys.argv[1], on_mismatch="error")
    sound = read(sys.argv[2]) if len(sys.argv) > 2 else made_up()
    for piece in bundle.stream(source=bundle.call("mel", sound)):
        print(piece.text, end="", flush=True)
    print()
