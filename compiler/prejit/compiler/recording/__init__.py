"""`prejit record`: run a program once and pack what jax compiles for it into a bundle.

    run the command with an empty cache -> read its events and the files -> merge with the bundle -> write

`jax_cache_packing` has these steps, `manifest_text` writes a manifest of what the program called,
`imported_anew` compares the two. `untraced_calls` makes the files by which programs start without traces. The
hook in the program's processes, which loads `hook` there, and the reading side are in
`prejit.runtime.recorded`. Imports `manifest` and `pipeline`.
"""
