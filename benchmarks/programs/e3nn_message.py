"""One equivariant message passing of e3nn: spherical harmonics, a tensor product and a linear map."""

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp

positions = jax.random.normal(jax.random.key(0), (6, 3))
senders, receivers = jnp.nonzero(1 - jnp.eye(6), size=30)
features = e3nn.normal("4x0e + 2x1o", jax.random.key(1), (6,))


@jax.jit
def message(features, positions):
    edges = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
    harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", edges, normalize=True)
    product = e3nn.tensor_product(features[senders], harmonics, filter_ir_out="0e + 1o")
    weights = e3nn.bessel(e3nn.norm(edges).array[:, 0], 4, 5.0).sum(-1)
    return e3nn.scatter_sum(product * weights[:, None], dst=receivers, output_size=6)


out = message(features, positions)
print(out.irreps, float(jnp.abs(out.array).sum()))
turn = e3nn.rand_matrix(jax.random.key(2), ())
turned = message(features.transform_by_matrix(turn), positions @ turn.T)
print(bool(jnp.allclose(turned.array, out.transform_by_matrix(turn).array, atol=1e-3)))
print(e3nn.norm(out).array[0, :4].tolist())
