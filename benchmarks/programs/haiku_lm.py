"""Train a tiny language model of dm-haiku: transform_with_state, an EMA as state, an LSTM unrolled."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax


def forward(tokens):
    x = hk.Embed(16, 8)(tokens)
    core = hk.LSTM(16)
    x, _ = hk.dynamic_unroll(core, x.swapaxes(0, 1), core.initial_state(tokens.shape[0]))
    scale = hk.ExponentialMovingAverage(0.9, name="scale")(jnp.abs(x).mean())
    return hk.Linear(16)(x.swapaxes(0, 1) / (1 + scale))


model = hk.transform_with_state(forward)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5, momentum=0.9))


def loss(params, state, key, tokens):
    logits, state = model.apply(params, state, key, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(), state


@jax.jit
def update(params, state, opt_state, key, tokens):
    (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, key, tokens)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), state, opt_state, value


tokens = jax.random.randint(jax.random.key(0), (4, 12), 0, 16)
params, state = jax.jit(model.init)(jax.random.PRNGKey(1), tokens[:, :-1])
opt_state = optimizer.init(params)
keys = hk.PRNGSequence(2)
for _ in range(4):
    params, state, opt_state, value = update(params, state, opt_state, next(keys), tokens)
    print(float(value))
print(jax.tree.map(float, state), float(optax.global_norm(params)))
