"""Model families as flax nnx modules, for Hugging Face directories as they are published.

`config_file` reads config.json, `registry` finds the family and makes the module, `parameters` names its
parameters, `sharding` splits them over a mesh, `precision` computes the stored values. `families` holds a
file for each decoder family, `encoders` one for each encoder, `layers` what they share. Begin with
`registry`.
"""
