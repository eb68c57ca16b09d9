"""Lower functions of the user: a [[program]] names a function, and a bundle holds it as StableHLO.

`modules` imports the user's modules, `finding` finds the function in them, `lower` traces and lowers it.
`calls` finds calls that a bundle cannot hold, `arrays` flattens arguments and results. Begin with `lower`.
"""
