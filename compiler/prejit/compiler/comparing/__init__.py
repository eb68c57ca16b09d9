"""`prejit diff`: what differs between two bundles, and how fast both run.

`difference` reads and compares, `speed` measures in processes that take turns (`timing_child` is their
program). It reads machine code with the worker's disassembler, in this process: nothing is compiled here.
Imports `compile` and `targets`. Begin with `difference`.
"""
