"""Search a policy for brax's inverted pendulum by evolution: rollouts of a population in one jit.

brax's own agents need `jax.device_put_replicated`, which jax 0.12 does not have any more.
"""

import jax
import jax.numpy as jnp
from brax import envs
from brax.training import networks
from jax.flatten_util import ravel_pytree

env = envs.create("inverted_pendulum", backend="positional", episode_length=50, auto_reset=False)
policy = networks.make_policy_network(
    env.action_size, env.observation_size, hidden_layer_sizes=(8,)
)
params = policy.init(jax.random.key(0))
flat, unflatten = ravel_pytree(params)


def reward(flat, key):
    def act(state, _):
        state = env.step(state, jnp.tanh(policy.apply(None, unflatten(flat), state.obs)))
        return state, state.reward * (1 - state.done)

    state, rewards = jax.lax.scan(act, env.reset(key), length=8)
    return rewards.sum() - jnp.abs(state.obs).sum()


@jax.jit
def generation(flat, key):
    noise = jax.random.normal(key, (8, flat.size))
    scores = jax.vmap(reward, (0, None))(flat + 0.1 * noise, key)
    weights = (scores - scores.mean()) / (scores.std() + 1e-6)
    return flat + 0.05 * weights @ noise, scores


for key in jax.random.split(jax.random.key(1), 3):
    flat, scores = generation(flat, key)
    print(scores.tolist())
print(jnp.linalg.norm(flat).item())
