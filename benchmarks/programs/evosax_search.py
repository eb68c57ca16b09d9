"""Search a minimum with an evolution strategy of evosax, generation by generation, then in one scan."""

import jax
import jax.numpy as jnp
from evosax.algorithms import CMA_ES


def fitness(x):
    return jnp.sum(x**2 - 2 * jnp.cos(2 * x), -1)


strategy = CMA_ES(population_size=8, solution=jnp.zeros(3))
params = strategy.default_params
state = strategy.init(jax.random.key(0), jnp.full(3, 2.0), params)


@jax.jit
def generation(state, key):
    ask, tell = jax.random.split(key)
    population, state = strategy.ask(ask, state, params)
    state, metrics = strategy.tell(tell, population, fitness(population), state, params)
    return state, metrics["best_fitness"]


for key in jax.random.split(jax.random.key(1), 3):
    state, best = generation(state, key)
    print(float(best))
state, path = jax.lax.scan(generation, state, jax.random.split(jax.random.key(2), 5))
print(path.tolist(), strategy.get_mean(state).tolist())
