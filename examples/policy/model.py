"""A policy of equinox that a robot asks 1,000 times a second: joint angles and speeds in, torques out."""

import equinox
import jax

policy = equinox.nn.MLP(17, 6, 256, 2, final_activation=jax.numpy.tanh, key=jax.random.key(0))
