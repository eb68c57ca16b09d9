"""Small random Whisper checkpoints and spectrograms, the same wherever they are made. No JAX, no torch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import cases as decoders
from .cases import linear, noise, norm, pick

COUNT = 12
ROWS, PROMPT, STEPS = 2, 4, 24
"""Sources, which are batched; tokens of a prompt, as many as published Whispers take; greedy tokens after."""

REFERENCE = Path(__file__).parent / "whisper_reference.npz"


@dataclass(frozen=True)
class Case(decoders.Case):
    """A configuration with a seed for its weights, spectrograms and prompts."""

    @property
    def prompt(self):
        """Int32 [ROWS, PROMPT]."""
        random = np.random.default_rng([self.seed, 0])
        return random.integers(0, self.config["vocab_size"], (ROWS, PROMPT), dtype=np.int32)

    @property
    def frames(self):
        """N, the number of frames that the model takes."""
        return 2 * int(self.config["max_source_positions"])

    @property
    def source(self):
        """Float32 [ROWS, mel bins, frames], of about the size of log-mel ones."""
        random = np.random.default_rng([self.seed, 1])
        shape = (ROWS, self.config["num_mel_bins"], self.frames)
        return random.uniform(-1, 1.5, shape).astype(np.float32)

    @property
    def lengths(self):
        """Int32 [ROWS]; a Whisper reads all frames."""
        return np.full(ROWS, self.frames, np.int32)

    def values(self, name, shape):
        """As in cases.py, but for the scale of embeddings."""
        values = noise(self.seed, name, shape)
        if ".embed_" in name:
            return values * np.float32(0.5)
        if len(shape) > 1:
            return values * np.float32(min(0.4, 1.5 / max(shape) ** 0.5))
        return values * np.float32(0.2) + np.float32(name.endswith("weight"))

    @property
    def tensor_shapes(self):
        config, width = self.config, self.config["d_model"]
        shapes = {
            "model.encoder.conv1.weight": (width, config["num_mel_bins"], 3),
            "model.encoder.conv2.weight": (width, width, 3),
            **dict.fromkeys(("model.encoder.conv1.bias", "model.encoder.conv2.bias"), (width,)),
            "model.encoder.embed_positions.weight": (config["max_source_positions"], width),
            **norm("model.encoder.layer_norm", width),
            "model.decoder.embed_tokens.weight": (config["vocab_size"], width),
            "model.decoder.embed_positions.weight": (config["max_target_positions"], width),
            **norm("model.decoder.layer_norm", width),
        }
        for side in ("encoder", "decoder"):
            inner = config[f"{side}_ffn_dim"]
            for layer in range(config[f"{side}_layers"]):
                block = f"model.{side}.layers.{layer}"
                for part in ("self_attn", "encoder_attn")[: 1 + (side == "decoder")]:
                    shapes |= norm(f"{block}.{part}_layer_norm", width)
                    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                        shapes |= linear(f"{block}.{part}.{name}", width, width)
                    del shapes[f"{block}.{part}.k_proj.bias"]
                shapes |= norm(f"{block}.final_layer_norm", width)
                shapes |= linear(f"{block}.fc1", width, inner)
                shapes |= linear(f"{block}.fc2", inner, width)
        return shapes


def cases():
    made, activations = [], ["gelu", "gelu", "relu", "silu", "gelu_new"]
    for number in range(COUNT):
        random = np.random.default_rng([20, number])
        heads = pick(random, [1, 2, 3, 6])
        # transformers wants an even width, for its sinusoids
        width = heads * pick(random, [4, 6, 8] if heads % 2 else [3, 4, 5, 8])
        divisors = [n for n in range(1, width + 1) if width % n == 0 and width // n > 1]
        config = {
            **{"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]},
            "vocab_size": pick(random, [29, 31, 37, 41]),
            **{"num_mel_bins": pick(random, [5, 8, 13]), "d_model": width},
            "encoder_layers": pick(random, [1, 2]),
            "encoder_attention_heads": pick(random, divisors),
            "encoder_ffn_dim": pick(random, [11, 24, 40]),
            "decoder_layers": pick(random, [1, 2, 3]),
            "decoder_attention_heads": heads,
            "decoder_ffn_dim": pick(random, [13, 24, 32]),
            "max_source_positions": pick(random, [7, 12, 25]),
            "max_target_positions": pick(random, [PROMPT + STEPS, 40]),
            "activation_function": activations[number % 5],
            "scale_embedding": number % 4 == 1,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
            "decoder_start_token_id": 1,
        }
        made.append(Case(f"whisper-{number:02}", config, 2000 + number))
    return tuple(made)
