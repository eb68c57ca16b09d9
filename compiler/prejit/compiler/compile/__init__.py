"""Compile StableHLO to executables, in worker processes.

`jobs` are the values that go in and come out; `keys.executable_key` says what decides an executable.
`executor.Executor` is what a build may ask for; `pool.WorkerPool` runs jobs in workers of this machine.
`worker_process` is the client of a worker. `worker` runs in the process itself: it compiles with `compiling`
(XLA through `xla`, then `disassembly` of CPU code) and measures with `timing`. A worker may run in an
environment of another jax, which has the server's dependencies and `iced-x86` only.

This package imports `targets`, `native` and `store`. Begin with `jobs`, then `executor`.
"""
