"""REINFORCE on CartPole of gymnax 1.0: a recurrent policy, rollouts in a scan, a batch of environments."""

import gymnax
import jax
import jax.numpy as jnp
import optax

env, env_params = gymnax.make("CartPole-v1")
optimizer = optax.adam(1e-2)


def policy(params, hidden, obs):
    hidden = jnp.tanh(obs @ params["in"] + hidden @ params["mix"])
    return hidden, hidden @ params["out"]


def rollout(params, key):
    def act(carry, key):
        obs, state, hidden = carry
        hidden, logits = policy(params, hidden, obs)
        choose, move = jax.random.split(key)
        action = jax.random.categorical(choose, logits)
        obs, state, reward, ended, cut, _ = env.step(move, state, action, env_params)
        return (obs, state, hidden * (1 - (ended | cut))), (
            jax.nn.log_softmax(logits)[action],
            reward,
        )

    obs, state = env.reset(key, env_params)
    return jax.lax.scan(act, (obs, state, jnp.zeros(8)), jax.random.split(key, 16))[1]


@jax.jit
def update(params, state, key):
    def loss(params):
        logs, rewards = jax.vmap(rollout, (None, 0))(params, jax.random.split(key, 8))
        returns = jnp.cumsum(rewards[:, ::-1], 1)[:, ::-1]
        return -(logs * (returns - returns.mean())).mean(), rewards.mean()

    (value, reward), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state, value, reward


sizes = {"in": (4, 8), "mix": (8, 8), "out": (8, 2)}
keys = jax.random.split(jax.random.key(0), 3)
params = {n: jax.random.normal(k, s) / 3 for k, (n, s) in zip(keys, sizes.items(), strict=True)}
state = optimizer.init(params)
for key in jax.random.split(jax.random.key(1), 3):
    params, state, value, reward = update(params, state, key)
    print(float(value), float(reward))
