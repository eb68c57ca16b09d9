"""Lower functions of the user: a [[program]] names a function, and a bundle holds it as StableHLO.

`modules` imports the user's modules, `found_function` finds the function in them, `function_lowering` traces
and lowers it. `traced_primitives` finds calls that a bundle cannot hold, `flat_arrays` flattens arguments and
results. Begin with `function_lowering`.
"""
