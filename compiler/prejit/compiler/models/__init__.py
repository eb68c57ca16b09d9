"""Model families as flax nnx modules, for Hugging Face directories as they are published.

`config_file` reads config.json, `model_registry` finds the family and makes the module, `parameters` names
its parameters, `decoder_matrices` splits them over a mesh, `quantizing` computes the stored values.
`families` holds the table of families and their modules, `layers` what these share. Begin with
`families.family_table` and `families.encoder_table`.
"""
