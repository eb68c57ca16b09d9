"""The targets of a bundle, and the tools that compile for each.

`target_table` turns a `[[target]]` table into a `target_classes.Target`. `toolchain` holds
what compiles for a target: a worker's command, packages and flags. A target that pins a jax version needs
an `environments.Environment`; `installing` makes it, with an interpreter of this machine. `build_host`
says what this machine can compile for, `listing` is `prejit targets`, `cpu_count` how many CPUs XLA sees.

This package imports `store`. Begin with `target_table`, then `toolchain`.
"""
