"""Fit a Bayesian logistic regression by variational inference, after numpyro's SVI example."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

x = jax.random.normal(jax.random.key(0), (64, 3))
y = (x @ jnp.array([1.0, -2.0, 0.5]) > 0).astype(jnp.float32)


def model(x, y=None):
    weights = numpyro.sample("weights", dist.Normal(0, 2).expand([3]).to_event(1))
    bias = numpyro.sample("bias", dist.Normal(0, 2))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights + bias), obs=y)


guide = AutoNormal(model)
svi = SVI(model, guide, numpyro.optim.Adam(0.05), Trace_ELBO())
result = svi.run(jax.random.key(1), 50, x, y, progress_bar=False)
print(result.losses[-3:].tolist())
print({name: value.tolist() for name, value in guide.median(result.params).items()})
predict = Predictive(model, guide=guide, params=result.params, num_samples=20)
print(predict(jax.random.key(2), x[:4])["y"].mean(0).tolist())
