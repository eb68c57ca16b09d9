"""Lowering in processes of their own, side by side, while the build's process waits and submits.

`crew` hands units of programs (`units`) to processes (`process`), each of which runs `child`. A child does
what the build's process would do with the same functions, and puts the results into the same directory;
`messages` are what both say. This package imports the steps that lower; of the steps only `run` imports it.
Begin with `crew`.
"""
