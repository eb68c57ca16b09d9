"""The files of a bundle: what they hold, how they are read and written, and every check before they are used.

`checks` holds the numbered checks; runtime/check-order.toml lists them in their order. Imports `machine` and
rooms below them, and no JAX. Begin with `root`.
"""
