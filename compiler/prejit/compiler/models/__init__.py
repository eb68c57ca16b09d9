"""Model families as flax nnx modules, for Hugging Face directories as they are published.

`registry` finds the family of a config.json; `families` and `encoders` hold one file each; `layers` what they
share. Begin with `registry`.
"""
