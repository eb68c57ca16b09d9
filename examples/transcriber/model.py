"""A Whisper of 0.3 million parameters, and how jax.jit would run it. A server needs none of this."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mel import HOP
from safetensors.numpy import load_file
from tones import KEYS, MOST_KEYS, RATE, SECONDS

from prejit.compiler.models import model_registry
from prejit.compiler.models.parameters import parametrized

CHECKPOINT = Path(__file__).parent / "checkpoint"
END, START = len(KEYS), len(KEYS) + 1  # tokens, beside one for each key
TOKENS = MOST_KEYS + 1  # the longest text and its end
FRAMES = RATE * SECONDS // HOP
WIDTH = 64
CONFIG = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "vocab_size": len(KEYS) + 2,
    "num_mel_bins": 80,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 4 * WIDTH,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 4 * WIDTH,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 16,
    "activation_function": "gelu",
    "tie_word_embeddings": True,
    "scale_embedding": False,
    "decoder_start_token_id": START,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END),
}

# Matrices are stored (out, in), as in a published checkpoint.
whisper = parametrized(model_registry.make_decoder(SimpleNamespace(**CONFIG), out_in=True))


@jax.jit
def transcribe(weights: dict[str, jax.Array], spectrogram: jax.Array) -> jax.Array:
    """Return the most likely tokens of a spectrogram [80, 200], int32 [7]; after the end come more ends."""
    model, one = whisper.bind(weights), jnp.ones(1, jnp.int32)
    memory = model.encode(spectrogram[None], FRAMES * one, TOKENS, "float32")

    def step(carry: Any, place: jax.Array) -> Any:
        token, memory = carry
        logits, memory = model(token[:, None], place * one, one, memory)
        following = jnp.where(token == END, END, logits.argmax(-1).astype(jnp.int32))
        return (following, memory), following[0]

    return jax.lax.scan(step, (START * one, memory), jnp.arange(TOKENS))[1]


@cache
def weights() -> dict[str, jax.Array]:
    """Return the trained weights."""
    return jax.device_put(load_file(CHECKPOINT / "model.safetensors"))


def generate(source: jax.Array) -> SimpleNamespace:
    """Do what `Bundle.generate` does, by jax.jit."""
    tokens = np.asarray(transcribe(weights(), source))
    return SimpleNamespace(token_ids=tokens[tokens != END])
