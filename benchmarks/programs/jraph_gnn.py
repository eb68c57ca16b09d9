"""Train a graph network of jraph on padded batches of random graphs, after its basic example."""

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax

random = np.random.default_rng(0)


def graph(nodes, edges):
    return jraph.GraphsTuple(
        nodes=random.normal(size=(nodes, 4)).astype(np.float32),
        edges=random.normal(size=(edges, 2)).astype(np.float32),
        senders=random.integers(0, nodes, edges),
        receivers=random.integers(0, nodes, edges),
        globals=np.zeros((1, 8), np.float32),
        n_node=np.array([nodes]),
        n_edge=np.array([edges]),
    )


def apply(params, graphs):
    network = jraph.GraphNetwork(
        update_edge_fn=jraph.concatenated_args(lambda x: jax.nn.relu(x @ params["edge"])),
        update_node_fn=jraph.concatenated_args(lambda x: jax.nn.relu(x @ params["node"])),
        update_global_fn=jraph.concatenated_args(lambda x: x @ params["global"]),
    )
    return network(graphs).globals


@jax.jit
def update(params, graphs, labels):
    def loss(params):
        mask = jraph.get_graph_padding_mask(graphs)
        return jnp.sum(mask * (apply(params, graphs)[:, 0] - labels) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return optax.apply_updates(params, jax.tree.map(lambda g: -0.01 * g, grads)), value


sizes = {"edge": (18, 8), "node": (28, 8), "global": (24, 8)}
params = {name: jnp.asarray(random.normal(size=s), jnp.float32) / 4 for name, s in sizes.items()}
for number in range(4):
    batch = jraph.batch_np([graph(random.integers(3, 6), 7) for _ in range(3)])
    graphs = jraph.pad_with_graphs(batch, n_node=16, n_edge=24, n_graph=4)
    params, value = update(params, graphs, jnp.arange(4.0))
    print(number, float(value))
