"""Train the transcriber on random calls, and write it as a checkpoint of transformers' Whisper.

    python train.py [--steps 700]

Attention alone takes long to find where each key is heard. So the encoder is trained to say it as well: at
each position which key is pressed, by the embedding of its token, and its place in the call, by the
embedding of that place.
"""

import argparse
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mel import log_mel
from model import CHECKPOINT, CONFIG, END, FRAMES, START, TOKENS, WIDTH, transcribe, whisper
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models
from tones import KEYS, SECONDS, dial, random_keys

BATCH, RATE = 32, 2e-3
Weights = dict[str, jax.Array]
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def first_weights() -> Weights:
    """Return random weights. The convolutions are large, so that sounds weigh as much as positions."""
    random, weights = np.random.default_rng(0), {}
    for name, leaf in whisper.weights.items():
        if len(leaf.shape) == 1:
            values = np.full(leaf.shape, name.endswith("norm.weight"))
        elif name == "model.encoder.embed_positions.weight":
            angles = np.arange(FRAMES // 2)[:, None] * 100 ** -np.linspace(0, 1, WIDTH // 2)
            values = np.concatenate([np.sin(angles), np.cos(angles)], 1)
        else:
            values = random.standard_normal(leaf.shape) / np.sqrt(np.prod(leaf.shape[1:]))
            values *= 6 if "conv" in name else 1
        weights[name] = jnp.asarray(values, jnp.float32)
    return weights


def make_batch(random: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Return a random batch.

    Returns:
        Sounds [B, 32000]; tokens [B, 7]; which key of the call is pressed at each position [B, 100], or -1.
    """
    times = np.linspace(0, SECONDS, FRAMES // 2, endpoint=False)[:, None]
    rows = []
    for _ in range(BATCH):
        keys = random_keys(random)
        call = dial(keys, random)
        tokens = [*map(KEYS.index, keys), *[END] * (TOKENS - len(keys))]
        pressed = (call.starts < times) & (times < call.ends)
        rows.append((call.sound, tokens, np.where(pressed.any(1), pressed.argmax(1), -1)))
    return tuple(np.array(part) for part in zip(*rows, strict=True))


def loss(weights: Weights, sounds: jax.Array, tokens: jax.Array, pressed: jax.Array) -> jax.Array:
    """Return the loss of the text, and of what the encoder says of each position."""

    def one(sound: jax.Array, tokens: jax.Array, pressed: jax.Array) -> jax.Array:
        model, row = whisper.bind(weights), jnp.ones(1, jnp.int32)
        decoder, hidden = model.model.decoder, model.hidden(log_mel(sound)[None])
        cache = tuple(block.make_cache(hidden, TOKENS, "float32") for block in decoder.layers)
        before = jnp.concatenate([jnp.full(1, START), tokens[:-1]])
        logits, _ = model(before[None], 0 * row, TOKENS * row, cache, every=True)
        text = jnp.mean(
            cross_entropy(logits[0], tokens), where=jnp.arange(TOKENS) <= pressed.max() + 1
        )

        place, on = jnp.maximum(pressed, 0), pressed >= 0
        heard = cross_entropy(
            decoder.embed_tokens.logits(hidden)[0], jnp.where(on, tokens[place], END)
        )
        counted = cross_entropy(decoder.embed_positions.logits(hidden)[0], place)
        return text + jnp.mean(heard + counted, where=on) + jnp.mean(heard, where=~on)

    return jax.vmap(one)(sounds, tokens, pressed).mean()


def train(steps: int) -> Weights:
    """Return trained weights. The same steps give the same weights up to rounding."""
    rate = optax.warmup_cosine_decay_schedule(0, RATE, min(50, steps // 2), steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1), optax.adamw(rate, b2=0.98, weight_decay=0.01)
    )

    @jax.jit
    def step(weights: Weights, state: Any, *batch: np.ndarray) -> tuple[Weights, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, *batch)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    weights, random = first_weights(), np.random.default_rng(1)
    state = optimizer.init(weights)
    for number in range(1, steps + 1):
        weights, state, value = step(weights, state, *make_batch(random))
        if number % 100 == 0:
            print(f"step {number} of {steps}: loss {value:.2f}", flush=True)
    return weights


def write(weights: Weights) -> None:
    """Write the checkpoint, whose tokenizer has one token for each key."""
    CHECKPOINT.mkdir(exist_ok=True)
    save_file(
        {name: np.asarray(each) for name, each in weights.items()}, CHECKPOINT / "model.safetensors"
    )
    (CHECKPOINT / "config.json").write_text(json.dumps(CONFIG, indent=1))
    chosen = {"decoder_start_token_id": START, "eos_token_id": END}
    (CHECKPOINT / "generation_config.json").write_text(json.dumps(chosen))
    names = [*KEYS, "<|endoftext|>", "<|startoftranscript|>"]
    tokenizer = Tokenizer(
        models.BPE({name: id for id, name in enumerate(names)}, [], unk_token=names[END])
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(names[END:])
    tokenizer.save(str(CHECKPOINT / "tokenizer.json"))


def share_of_right_keys(weights: Weights, calls: int = 500) -> float:
    """Return the share of keys that are right, each at its place, in calls that are new to the model."""
    random, mel, right, total = np.random.default_rng(2), jax.jit(log_mel), 0, 0
    for _ in range(calls):
        keys = random_keys(random)
        tokens = transcribe(weights, mel(dial(keys, random).sound))
        found = [KEYS[token] for token in tokens.tolist() if token < END]
        right += sum(map(str.__eq__, found, keys))
        total += max(len(found), len(keys))
    return right / total


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=700)
    trained = train(parser.parse_args().steps)
    write(trained)
    print(f"{share_of_right_keys(trained):.1%} of the keys of 500 new calls are right")
