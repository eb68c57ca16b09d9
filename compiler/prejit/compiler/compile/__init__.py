"""StableHLO -> executable, in worker processes.

`pool` gives `jobs` to workers; `worker` is what such a process runs, `compiling` decides what comes out.
Imports `targets` and `native`. Begin with `jobs`.
"""
