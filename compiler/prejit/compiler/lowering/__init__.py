"""A model or a user's function -> StableHLO.

`decoder`, `encoder`, `function` and `product` lower one kind each; `export` holds the common way through
jax.export. Imports `models` and `manifest`. Begin with `decoder`.
"""
