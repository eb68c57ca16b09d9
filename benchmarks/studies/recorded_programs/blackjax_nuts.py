"""Sample a regression with blackjax: window adaptation, then NUTS in a scan, after its "Quickstart"."""

import blackjax
import jax
import jax.numpy as jnp
import jax.scipy.stats as stats

key = jax.random.key(0)
x = jax.random.normal(key, (500, 3))
truth = jnp.array([1.0, -2.0, 0.5])
observed = x @ truth + jax.random.normal(jax.random.key(1), (500,))


def logdensity(position: dict[str, jax.Array]) -> jax.Array:
    """Return the log density of weights and scale, given the observations."""
    weights, log_scale = position["weights"], position["log_scale"]
    prior = stats.norm.logpdf(weights, 0, 10).sum() + stats.norm.logpdf(log_scale)
    return prior + stats.norm.logpdf(observed, x @ weights, jnp.exp(log_scale)).sum()


initial = {"weights": jnp.zeros(3), "log_scale": jnp.array(0.0)}
warmup = blackjax.window_adaptation(blackjax.nuts, logdensity)
(state, parameters), _ = warmup.run(jax.random.key(2), initial, num_steps=100)
kernel = blackjax.nuts(logdensity, **parameters).step


@jax.jit
def sample(key: jax.Array, state):
    """Return the positions of 100 steps."""

    def one(state, key):
        state, _ = kernel(key, state)
        return state, state.position

    return jax.lax.scan(one, state, jax.random.split(key, 100))[1]


positions = sample(jax.random.key(3), state)
print(" ".join(f"{float(value):.2f}" for value in positions["weights"].mean(axis=0)))
