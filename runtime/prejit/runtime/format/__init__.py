"""What the files of a bundle say, and every check before they are used.

`schema` holds the dataclasses, `checks`, `config_checks`, `layer_checks` and `safetensors` the numbered
checks of docs/bundle-format.md; `opening` reads a bundle in a fixed order and chooses a target, `blobs`
hashes every byte before it is used. Imports `machine` and `store`, and no JAX. Begin with `opening`.
"""
