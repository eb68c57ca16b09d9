"""A model or a user's function -> StableHLO.

`decoder` lowers a decoder's programs, with `sampling` for the choice of tokens, `encoder` an encoder's.
`user` lowers a function of the user, `product` one matrix product that is measured. Each passes a function to
`export`, which lowers it through jax.export to a portable artifact: the StableHLO that is compiled for
targets, and by the runtime in a fallback. The result is a `program.LoweredProgram`. Imports `models`,
`native` and `manifest`. Begin with `decoder`.
"""
