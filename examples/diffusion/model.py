"""A small U-Net in flax.nnx that removes noise from images, and a sampler that calls it 20 times (DDIM).

Sources: Ronneberger et al. 2015 (U-Net); Song et al. 2021, "Denoising Diffusion Implicit Models", eq. 12.
The weights are random: this shows where the time goes, not what a trained model draws.
"""

import jax
import jax.numpy as jnp
from flax import nnx

SIZE, CHANNELS, STEPS = 32, 3, 20


class Block(nnx.Module):
    """Two convolutions with the noise level added between them: [B, H, W, C] -> [B, H, W, D]."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(inputs, outputs, (3, 3), rngs=rngs)
        self.level = nnx.Linear(64, outputs, rngs=rngs)
        self.norm = nnx.GroupNorm(outputs, num_groups=8, rngs=rngs)
        self.second = nnx.Conv(outputs, outputs, (3, 3), rngs=rngs)

    def __call__(self, x: jax.Array, level: jax.Array) -> jax.Array:
        """Return the features of x [B, H, W, C] at noise levels [B, 64]."""
        x = self.first(x) + self.level(level)[:, None, None]
        return nnx.silu(self.second(nnx.silu(self.norm(x))))


class UNet(nnx.Module):
    """Predicts the noise in images [B, 32, 32, 3] of one noise level each."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.down = Block(CHANNELS, 32, rngs)
        self.middle = Block(32, 64, rngs)
        self.up = Block(64 + 32, 32, rngs)
        self.out = nnx.Conv(32, CHANNELS, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array, level: jax.Array) -> jax.Array:
        """Return the noise in x [B, 32, 32, 3] of levels [B]."""
        angles = level[:, None] * 10 ** jnp.linspace(0, 3, 32)
        level = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        high = self.down(x, level)
        low = self.middle(nnx.avg_pool(high, (2, 2), (2, 2)), level)
        low = jax.image.resize(low, (*high.shape[:3], low.shape[-1]), "nearest")
        return self.out(self.up(jnp.concatenate([high, low], -1), level))


class Sampler(nnx.Module):
    """Draws images from noise."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.unet = UNet(rngs)

    def __call__(self, noise: jax.Array) -> jax.Array:
        """Return images [B, 32, 32, 3] for noise of the same shape."""
        signal = jnp.cos(jnp.linspace(0.49 * jnp.pi, 0.01, STEPS + 1)) ** 2  # share of the image

        def step(x: jax.Array, share: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            now, following = share
            predicted = self.unet(x, jnp.full(x.shape[0], now))
            image = (x - jnp.sqrt(1 - now) * predicted) / jnp.sqrt(now)
            return jnp.sqrt(following) * image + jnp.sqrt(1 - following) * predicted, None

        return jax.lax.scan(step, noise, (signal[:-1], signal[1:]))[0]


sampler = Sampler(nnx.Rngs(0))
