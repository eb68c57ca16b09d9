"""`prejit diff`, and what `prejit inspect` shows of programs: what differs, how fast it is, what it costs.

`difference` reads and compares, `speed` measures in processes that take turns (`timing_child` is their
program); `inspected_programs` looks into one bundle. They read machine code with the worker's
disassembler, in this process: no program of a bundle is compiled here. Imports `bench`, `compile` and
`targets`. Begin with `difference`.
"""
