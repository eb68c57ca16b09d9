"""A model or a user's function -> StableHLO.

`decoder` lowers a decoder's programs, with `sampling_programs` for the choice of tokens, `encoder_programs`
an encoder's, `user` a function of the user. Each passes a function to `export`, which lowers it through
jax.export to a portable artifact: the StableHLO that is compiled for targets, and by the runtime in a
fallback. The result is an `export.LoweredProgram`. Imports `models`,
`native` and `manifest`. Begin with `decoder`.
"""
