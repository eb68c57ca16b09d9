"""Compile StableHLO to executables, in worker processes.

`compile_jobs` has the values that go in and come out, and the key of everything that decides an executable.
`executor.Executor` is the interface that a build uses; `pool.WorkerPool` implements it with worker processes
of this machine. `worker_process` starts such a process and sends it requests. The package `worker` is the
code that runs in it. `schedule` decides for a cluster.

This package imports `targets`, `native` and `store`. Begin with `compile_jobs`, then `executor`.
"""
