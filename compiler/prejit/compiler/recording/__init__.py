"""`prejit record`: run a program once and pack what jax compiles for it into a bundle.

    run the command with an empty cache -> read its events and the files -> merge with the bundle -> write

`recorder` has the steps, `merging` the targets of the bundle, `program_sections` and `manifest_text` the
manifest of what the program called. The hook in the program's processes and the reading side are in
`prejit.runtime.recorded`. Imports `manifest` and `pipeline`. Begin with `recorder`.
"""
