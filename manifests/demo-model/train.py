"""Trains the demo model: a small GPT-2 that writes Python, from the text every machine has.

The text is the source code of Python's own standard library, so nothing is downloaded. From it the
script trains a byte-level BPE tokenizer and a decoder with the exact semantics of GPT-2 (pre-LN,
learned positions, tanh-approximated GELU, tied head), measures both against n-gram baselines on
files held out from training, and writes a directory in the Hugging Face layout, model card
included. Every number in the card is measured by the run that writes it.

    python train.py --out manifests/demo-model

Sources: Radford et al. 2019 (GPT-2) for the architecture; Loshchilov & Hutter 2019 (AdamW);
Witten & Bell 1991 for the interpolated bigram.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import platform
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

Tokens = NDArray[np.int32]

END_OF_TEXT = "<|endoftext|>"
SEED = 0
VALIDATION_PERCENT = 5
STEPS = 4500
BATCH_TOKENS = 2048
SHORT_WINDOW = 128  # the first SHORT_SHARE of the steps; attention is cheap there
SHORT_SHARE = 0.8
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 200
WEIGHT_DECAY = 0.1
PROMPTS = ("def main(",)
SAMPLE_TOKENS = 160

LIBRARY = Path(sysconfig.get_path("stdlib"))
# Tests, other people's packages, and directories or files that hold tables instead of code.
# _sysconfigdata* and config-* differ between machines with the same Python.
SKIPPED_PARTS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SKIPPED_PREFIXES = ("encodings/", "pydoc_data/", "html/entities.py", "_sysconfigdata", "config-")


@dataclass(frozen=True)
class Shape:
    """The sizes of the model: D model width, N heads, L layers, S positions, V vocabulary."""

    width: int = 192
    heads: int = 4
    layers: int = 3
    positions: int = 512
    vocabulary: int = 2048


# --- Text -----------------------------------------------------------------------------------------


def read_library() -> dict[str, str]:
    """The standard library's sources by relative path, in sorted order."""
    files: dict[str, str] = {}
    for path in sorted(LIBRARY.rglob("*.py")):
        name = path.relative_to(LIBRARY).as_posix()
        if SKIPPED_PARTS.isdisjoint(name.split("/")) and not name.startswith(SKIPPED_PREFIXES):
            files[name] = path.read_text(encoding="utf-8")
    return files


def is_validation(name: str) -> bool:
    """Whether the file is held out; depends on its relative path and the seed only."""
    digest = hashlib.sha256(f"{SEED}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < VALIDATION_PERCENT


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """A GPT-2 style byte-level BPE of exactly `vocabulary` entries; END_OF_TEXT is id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tokens:
    """All texts as one stream, int32 [tokens], each followed by END_OF_TEXT."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = [token for item in tokenizer.encode_batch(texts) for token in (*item.ids, end)]
    return np.array(ids, dtype=np.int32)


# --- Model ----------------------------------------------------------------------------------------
# Attributes carry GPT-2's published names, so that a parameter's path is its name in the file.


class Attention(nnx.Module):
    """Causal multi-head self-attention, float32 [B, T, D] to [B, T, D]."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        self.heads = shape.heads
        self.c_attn = linear(shape.width, 3 * shape.width, rngs)
        self.c_proj = linear(shape.width, shape.width, rngs, residual_layers=shape.layers)

    def __call__(self, x: Array) -> Array:
        """What each position gathers from itself and from those before it."""
        batch, length, width = x.shape
        heads = self.c_attn(x).reshape(batch, length, 3, self.heads, -1).transpose(2, 0, 3, 1, 4)
        query, key, value = heads  # [B, N, T, H] each
        # Written out, since it is a seventh faster on a CPU than jax.nn.dot_product_attention.
        scores = jnp.einsum("bnth,bnsh->bnts", query * query.shape[-1] ** -0.5, key)
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
        mixed = jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(scores), value)
        return self.c_proj(mixed.transpose(0, 2, 1, 3).reshape(batch, length, width))


class MLP(nnx.Module):
    """The feed-forward half of a block, float32 [B, T, D] to [B, T, D]."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        self.c_fc = linear(shape.width, 4 * shape.width, rngs)
        self.c_proj = linear(4 * shape.width, shape.width, rngs, residual_layers=shape.layers)

    def __call__(self, x: Array) -> Array:
        """Each position by itself."""
        return self.c_proj(jax.nn.gelu(self.c_fc(x), approximate=True))  # gelu_new


class Block(nnx.Module):
    """A pre-LN transformer block, float32 [B, T, D] to [B, T, D]."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        self.ln_1 = layer_norm(shape.width, rngs)
        self.attn = Attention(shape, rngs)
        self.ln_2 = layer_norm(shape.width, rngs)
        self.mlp = MLP(shape, rngs)

    def __call__(self, x: Array) -> Array:
        """The residual stream with both halves added."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nnx.Module):
    """The decoder: int32 tokens [B, T] to float32 logits [B, T, V]."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        normal = nnx.initializers.normal(0.02)
        self.wte = nnx.Embed(shape.vocabulary, shape.width, embedding_init=normal, rngs=rngs)
        self.wpe = nnx.Embed(shape.positions, shape.width, embedding_init=normal, rngs=rngs)
        self.h = nnx.List([Block(shape, rngs) for _ in range(shape.layers)])
        self.ln_f = layer_norm(shape.width, rngs)

    def __call__(self, tokens: Array) -> Array:
        """Logits of the token that follows each position."""
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.wte.attend(self.ln_f(x))


def linear(
    inputs: int, outputs: int, rngs: nnx.Rngs, residual_layers: int | None = None
) -> nnx.Linear:
    """GPT-2's Conv1D, kernel [in, out]; what writes to the residual stream starts smaller."""
    scale = 0.02 if residual_layers is None else 0.02 / math.sqrt(2 * residual_layers)
    return nnx.Linear(inputs, outputs, kernel_init=nnx.initializers.normal(scale), rngs=rngs)


def layer_norm(width: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Layer norm as GPT-2 and torch compute it: epsilon 1e-5, two-pass variance."""
    return nnx.LayerNorm(width, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


# --- Training -------------------------------------------------------------------------------------


def loss_of(model: GPT2, window: Array) -> Array:
    """Mean cross-entropy in nats per token of an int32 window [B, T + 1]."""
    logits = model(window[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:]).mean()


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(model: GPT2, optimizer: nnx.Optimizer[GPT2], window: Array) -> Array:
    """Updates model and optimizer in place; the loss before the update."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, window)
    optimizer.update(model, gradients)
    return loss


def windows(tokens: Tokens, length: int, offset: int = 0) -> Tokens:
    """Neighbouring windows [rows, length + 1]: each target is the input of what follows."""
    rows = (len(tokens) - offset - 1) // length
    starts = offset + np.arange(rows) * length
    return tokens[starts[:, None] + np.arange(length + 1)]


def batches(tokens: Tokens, length: int) -> Iterator[Array]:
    """Endless shuffled epochs of windows [B, length + 1], cut at a new offset each epoch."""
    rng = np.random.default_rng(SEED)
    size = BATCH_TOKENS // length
    while True:
        rows = rng.permutation(windows(tokens, length, offset=int(rng.integers(length))))
        for start in range(0, len(rows) - size + 1, size):
            yield jnp.asarray(rows[start : start + size])


def make_optimizer(model: GPT2, steps: int) -> nnx.Optimizer[GPT2]:
    """AdamW with warm-up, cosine decay and clipping; only matrices decay."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, PEAK_LEARNING_RATE, min(WARMUP_STEPS, steps // 2), steps, PEAK_LEARNING_RATE / 100
    )
    return nnx.Optimizer(
        model,
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(
                rate,
                b2=0.95,
                weight_decay=WEIGHT_DECAY,
                mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim >= 2, params),
            ),
        ),
        wrt=nnx.Param,
    )


def train(shape: Shape, tokens: Tokens, steps: int) -> tuple[GPT2, float]:
    """Trains a fresh model, printing its progress; the model and the seconds that it took."""
    model = GPT2(shape, nnx.Rngs(SEED))
    optimizer = make_optimizer(model, steps)
    short, long = batches(tokens, SHORT_WINDOW), batches(tokens, shape.positions)
    started = time.monotonic()
    recent: list[Array] = []
    for step in range(1, steps + 1):
        window = next(short if step <= SHORT_SHARE * steps else long)
        recent.append(train_step(model, optimizer, window))
        if step % 50 == 0 or step in (1, steps):
            loss = float(np.mean(jax.device_get(recent)))
            seconds = time.monotonic() - started
            rate = step * BATCH_TOKENS / seconds
            left = seconds / step * (steps - step)
            progress = f"step {step}/{steps}  loss {loss:.3f}  {rate:,.0f} tokens/s"
            print(f"{progress}  {left:.0f} s left", flush=True)
            recent.clear()
    return model, time.monotonic() - started


# --- Measuring ------------------------------------------------------------------------------------


def model_loss(model: GPT2, rows: Tokens) -> float:
    """Mean nats per target of windows [rows, T + 1]."""
    score = nnx.jit(loss_of)
    chunks = [jnp.asarray(rows[start : start + 8]) for start in range(0, len(rows), 8)]
    return math.fsum(float(score(model, chunk)) * len(chunk) for chunk in chunks) / len(rows)


def baseline_losses(train_tokens: Tokens, rows: Tokens, vocabulary: int) -> tuple[float, float]:
    """Mean nats per target of an add-one unigram and of a bigram interpolated with it.

    The bigram is Witten and Bell's: a context's weight on the unigram is the share of new
    followers among all that it has had, so there is nothing to tune.
    """
    before, after = rows[:, :-1], rows[:, 1:]
    counts = np.bincount(train_tokens, minlength=vocabulary) + 1
    single = counts / counts.sum()
    index = train_tokens[:-1].astype(np.int64) * vocabulary + train_tokens[1:]
    pairs = np.bincount(index, minlength=vocabulary**2).reshape(vocabulary, vocabulary)
    seen = pairs.sum(axis=1)
    followers = np.maximum((pairs > 0).sum(axis=1), 1)  # an unseen context falls to the unigram
    double = (pairs[before, after] + followers[before] * single[after]) / (seen + followers)[before]
    return float(-np.log(single[after]).mean()), float(-np.log(double).mean())


def target_bytes(tokenizer: Tokenizer, rows: Tokens) -> int:
    """How many bytes of text the targets stand for; END_OF_TEXT stands for none."""
    ids = range(tokenizer.get_vocab_size())
    # A byte-level token is spelt with one character for each of its bytes.
    sizes = np.array([len(tokenizer.id_to_token(token) or "") for token in ids])
    sizes[tokenizer.token_to_id(END_OF_TEXT)] = 0
    return int(sizes[rows[:, 1:]].sum())


def continue_text(model: GPT2, tokenizer: Tokenizer, prompt: str) -> str:
    """The prompt and the most likely text after it."""
    forward = nnx.jit(GPT2.__call__)
    ids = tokenizer.encode(prompt).ids
    buffer = np.zeros((1, model.wpe.num_embeddings), np.int32)
    buffer[0, : len(ids)] = ids
    for end in range(len(ids), len(ids) + SAMPLE_TOKENS):
        logits = np.asarray(forward(model, jnp.asarray(buffer)))[0, end - 1]
        buffer[0, end] = np.argmax(logits)
        if buffer[0, end] == tokenizer.token_to_id(END_OF_TEXT):
            break
    return tokenizer.decode(buffer[0, : end + 1].tolist())


# --- Writing --------------------------------------------------------------------------------------


def published_weights(model: GPT2) -> dict[str, NDArray[np.float32]]:
    """The parameters under the names and in the layouts of the published GPT-2."""
    leaf_names = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}
    weights: dict[str, NDArray[np.float32]] = {}
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        *modules, leaf = map(str, path)
        weights[".".join(["transformer", *modules, leaf_names[leaf]])] = np.asarray(parameter[...])
    return weights


def write_model(out: Path, model: GPT2, shape: Shape, tokenizer: Tokenizer) -> None:
    """Writes weights, tokenizer and settings in the Hugging Face layout."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    out.mkdir(parents=True, exist_ok=True)
    weights_file = out / "model.safetensors"
    save_file(published_weights(model), weights_file, metadata={"format": "pt"})
    weights_file.chmod(0o644)  # safetensors creates it for its owner alone
    tokenizer.save(str(out / "tokenizer.json"))
    settings: dict[str, dict[str, object]] = {
        "config.json": {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "attn_pdrop": 0.0,
            "bos_token_id": end,
            "embd_pdrop": 0.0,
            "eos_token_id": end,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-5,
            "n_embd": shape.width,
            "n_head": shape.heads,
            "n_inner": None,
            "n_layer": shape.layers,
            "n_positions": shape.positions,
            "resid_pdrop": 0.0,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "vocab_size": shape.vocabulary,
        },
        "generation_config.json": {"bos_token_id": end, "eos_token_id": end, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2TokenizerFast",
            "model_max_length": shape.positions,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
        },
    }
    for name, value in settings.items():
        (out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


CARD = """\
---
license: other
license_name: psf-2.0
license_link: LICENSE
library_name: transformers
pipeline_tag: text-generation
tags: [gpt2, python, tiny]
---

# prejit's demo model

A GPT-2 of {parameters:,} parameters that continues Python source code. With it prejit
can be built, run and tested without a download. It has learnt how Python looks, knows little of
what Python means, and may repeat its text. `train.py` trained it and wrote every other file here,
this one included, with the numbers of that run.

## Model

GPT-2 exactly: pre-LN, learned positions, `gelu_new`, tied head, float32. {layers} layers, width
{width}, {heads} heads, {positions} positions, a byte-level BPE of {vocabulary} entries.
`<|endoftext|>` (id 0) ends a text.

## Data

The `.py` files of the standard library of Python {python}, without tests, installed packages and
what is table rather than code (`encodings/`, `pydoc_data/`, `html/entities.py`) or differs between
machines (build settings). A file is held out for validation by a hash of its path, {percent} in
100; the tokenizer saw only training files.

| | |
| --- | --- |
| training text | {train_files} files, {train_tokens:,} tokens |
| its sha256 (path, NUL, source, NUL for each file) | `{text_sha256}` |
| validation text | {validation_files} files, {scored_tokens:,} tokens scored |
| bytes per token, validation | {bytes_per_token:.2f} |

## Training

{steps:,} steps of {batch_tokens:,} tokens ({epochs:.1f} epochs) in {minutes:.0f} minutes of
wall clock on {cores} CPU cores, the first {short_share:.0%} in windows of {short_window} tokens, the rest in
windows of {positions}. AdamW, peak learning rate {rate:g}, {warmup} warm-up steps, then cosine,
weight decay {decay:g} on matrices, clipping at 1, no dropout, seed {seed}.
Made with {versions}.
The loss on every tenth training window at the end is {train_loss:.3f} nats a token.

## Validation

All on the same held-out tokens, in windows of {positions}. The n-grams are counted on the training
tokens: the unigram with add-one smoothing, the bigram interpolated with it (Witten-Bell). Short
runs, scored on part of the same files, chose the learning rate.

| | nats per token | bits per byte | perplexity |
| --- | --- | --- | --- |
{loss_rows}

## What it writes

{samples}
## Licence

The text is Python's: Copyright (c) 2001 and later Python Software Foundation, all rights reserved,
under the PSF licence (PSF-2.0), with the older notices that [LICENSE](LICENSE) holds. Weights and
tokenizer come under the same licence, so that nobody has to decide whether they derive from it.

## Repeat it

    make demo-model

The same Python gives the same text, split and tokenizer; the same library versions on the same
kind of CPU give the same weights up to rounding.
"""


def make_card(facts: dict[str, Any], losses: dict[str, float], samples: dict[str, str]) -> str:
    """The model card, from what the run measured and from this file's constants."""
    nats_in_a_bit_per_byte = math.log(2) * facts["bytes_per_token"]
    packages = ("jax", "flax", "optax", "tokenizers")
    return CARD.format(
        **facts,
        python=platform.python_version(),
        percent=VALIDATION_PERCENT,
        batch_tokens=BATCH_TOKENS,
        short_window=SHORT_WINDOW,
        short_share=SHORT_SHARE,
        cores=os.cpu_count(),
        rate=PEAK_LEARNING_RATE,
        warmup=WARMUP_STEPS,
        decay=WEIGHT_DECAY,
        seed=SEED,
        versions=", ".join(f"{name} {metadata.version(name)}" for name in packages),
        loss_rows="\n".join(
            f"| {name} | {nats:.3f} | {nats / nats_in_a_bit_per_byte:.3f} | {math.exp(nats):.1f} |"
            for name, nats in losses.items()
        ),
        samples="\n".join(
            f"{title}:\n\n```text\n{text.rstrip()}\n```\n" for title, text in samples.items()
        ),
    )


def main() -> None:
    """Trains, measures and writes the demo model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="DIR")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()

    shape = Shape()
    licence = (LIBRARY / "LICENSE.txt").read_text(encoding="utf-8")
    library = read_library()
    train_texts = {name: text for name, text in library.items() if not is_validation(name)}
    validation_texts = [text for name, text in library.items() if is_validation(name)]
    tokenizer = train_tokenizer(list(train_texts.values()), shape.vocabulary)
    train_tokens = encode(tokenizer, list(train_texts.values()))
    rows = windows(encode(tokenizer, validation_texts), shape.positions)
    scored_tokens = rows[:, 1:].size
    print(f"{len(train_texts)} files, {len(train_tokens):,} tokens; {scored_tokens:,} held out")

    model, seconds = train(shape, train_tokens, arguments.steps)
    unigram, bigram = baseline_losses(train_tokens, rows, shape.vocabulary)
    losses = {"unigram": unigram, "bigram": bigram, "**this model**": model_loss(model, rows)}
    print("  ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))

    write_model(arguments.out, model, shape, tokenizer)
    (arguments.out / "LICENSE").write_text(licence, encoding="utf-8")
    text = "".join(f"{name}\0{text}\0" for name, text in train_texts.items())
    facts = dataclasses.asdict(shape) | {
        "parameters": sum(array.size for array in published_weights(model).values()),
        "steps": arguments.steps,
        "epochs": arguments.steps * BATCH_TOKENS / len(train_tokens),
        "minutes": seconds / 60,
        "train_files": len(train_texts),
        "validation_files": len(validation_texts),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "train_tokens": len(train_tokens),
        "scored_tokens": scored_tokens,
        "bytes_per_token": target_bytes(tokenizer, rows) / scored_tokens,
        "train_loss": model_loss(model, windows(train_tokens, shape.positions)[::10]),
    }
    samples = {f"`{prompt}`, greedy": continue_text(model, tokenizer, prompt) for prompt in PROMPTS}
    card = make_card(facts, losses, samples)
    (arguments.out / "README.md").write_text(card, encoding="utf-8")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
