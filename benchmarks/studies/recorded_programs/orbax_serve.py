"""Restore a checkpoint with orbax and answer requests of three lengths. The first start writes it."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx


class Block(nnx.Module):
    """Attention and a feed-forward layer, each added to its input."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.Linear(4 * width, width, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Scorer(nnx.Module):
    """Scores sequences of tokens."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(1000, 128, rngs=rngs)
        self.blocks = nnx.List([Block(128, rngs=rngs) for _ in range(4)])
        self.head = nnx.Linear(128, 1, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=1))[:, 0]


path = Path(sys.argv[1]).absolute()
with ocp.StandardCheckpointer() as checkpointer:
    if not path.exists():
        checkpointer.save(path, nnx.state(Scorer(rngs=nnx.Rngs(0)), nnx.Param))
        checkpointer.wait_until_finished()
    model = nnx.eval_shape(lambda: Scorer(rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    restored = checkpointer.restore(path, params)
model = nnx.merge(graph, restored, rest)
score = nnx.jit(lambda model, tokens: model(tokens))
for length in (16, 64, 128):
    print(f"{float(score(model, jnp.ones((4, length), jnp.int32))[0]):.4f}")
