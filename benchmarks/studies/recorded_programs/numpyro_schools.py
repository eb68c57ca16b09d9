"""The eight schools model with NUTS, after numpyro's front page."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Predictive
from numpyro.infer.reparam import TransformReparam

y = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
sigma = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def eight_schools(sigma: jax.Array, y: jax.Array | None = None) -> None:
    """Effects of coaching in eight schools."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", len(sigma)):
        with numpyro.handlers.reparam(config={"theta": TransformReparam()}):
            affine = dist.transforms.AffineTransform(mu, tau)
            theta = numpyro.sample(
                "theta", dist.TransformedDistribution(dist.Normal(0.0, 1.0), affine)
            )
        numpyro.sample("obs", dist.Normal(theta, sigma), obs=y)


mcmc = MCMC(NUTS(eight_schools), num_warmup=100, num_samples=100, progress_bar=False)
mcmc.run(jax.random.key(0), sigma, y=y)
samples = mcmc.get_samples()
drawn = Predictive(eight_schools, samples)(jax.random.key(1), sigma)["obs"]
print(f"{float(samples['mu'].mean()):.3f} {drawn.shape}")
