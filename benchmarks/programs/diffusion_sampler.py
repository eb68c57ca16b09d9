"""Denoise with a small U-shaped network: DDIM steps in a scan, and classifier-free guidance by vmap."""

import functools

import jax
import jax.numpy as jnp

STEPS = 8


def make_network(width):
    def init(key):
        keys = jax.random.split(key, 3)
        shapes = ((3, 3, 2, width), (3, 3, width, width), (3, 3, width, 1))
        return [
            jax.random.normal(k, s) / (9 * s[2]) ** 0.5 for k, s in zip(keys, shapes, strict=True)
        ]

    def apply(params, x, t, label):
        conv = functools.partial(
            jax.lax.conv_general_dilated,
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        time = jnp.full_like(x, t / STEPS) + 0.1 * label
        h = jax.nn.silu(conv(jnp.concatenate([x, time], -1), params[0]))
        low = jax.image.resize(
            h, (h.shape[0], h.shape[1] // 2, h.shape[2] // 2, h.shape[3]), "linear"
        )
        h = h + jax.image.resize(jax.nn.silu(conv(low, params[1])), h.shape, "nearest")
        return conv(h, params[2])

    return init, apply


init, apply = make_network(width=8)
alphas = jnp.cumprod(1 - jnp.linspace(1e-4, 0.3, STEPS))


@functools.partial(jax.jit, static_argnames=("shape", "guidance"))
def sample(params, key, *, shape, guidance=2.0):
    def denoise(x, t):
        noises = jax.vmap(lambda label: apply(params, x, t, label))(jnp.array([0.0, 1.0]))
        noise = noises[0] + guidance * (noises[1] - noises[0])
        now, before = alphas[t], jnp.where(t > 0, alphas[t - 1], 1.0)
        clean = (x - jnp.sqrt(1 - now) * noise) / jnp.sqrt(now)
        return jnp.sqrt(before) * clean + jnp.sqrt(1 - before) * noise, jnp.abs(clean).mean()

    return jax.lax.scan(denoise, jax.random.normal(key, shape), jnp.arange(STEPS)[::-1])


params = init(jax.random.key(0))
for guidance in (1.0, 2.0):
    image, sizes = sample(params, jax.random.key(1), shape=(2, 8, 8, 1), guidance=guidance)
    print(float(image.mean()), float(image.std()), sizes.tolist())
