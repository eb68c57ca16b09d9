"""Solve and differentiate Lotka-Volterra equations with diffrax, and a noisy path, after its examples."""

import diffrax
import jax
import jax.numpy as jnp


def field(t, y, args):
    prey, hunters = y
    a, b, c, d = args
    return jnp.stack([a * prey - b * prey * hunters, c * prey * hunters - d * hunters])


def solve(args, y0):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        t0=0,
        t1=8,
        dt0=0.1,
        y0=y0,
        args=args,
        saveat=diffrax.SaveAt(ts=jnp.linspace(0, 8, 9)),
        stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-5),
    )


args, y0 = jnp.array([0.6, 0.4, 0.3, 0.5]), jnp.array([2.0, 1.0])
solution = solve(args, y0)
print(solution.ys.tolist(), int(solution.stats["num_steps"]))
print(jax.jit(jax.grad(lambda args: solve(args, y0).ys[-1, 0]))(args).tolist())
path = diffrax.VirtualBrownianTree(0, 1, tol=1e-2, shape=(2,), key=jax.random.key(0))
terms = diffrax.MultiTerm(
    diffrax.ODETerm(lambda t, y, args: -y),
    diffrax.ControlTerm(lambda t, y, args: 0.1 * jnp.eye(2), path),
)
print(diffrax.diffeqsolve(terms, diffrax.Euler(), 0, 1, 0.05, y0).ys.tolist())
