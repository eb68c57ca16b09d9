"""The code that runs in a worker process. Start it with `python -m prejit.compiler.compile.worker`.

`worker_requests` answers requests, each in a fork: it measures, or compiles with `worker_compile` (XLA
through `xla`, then `disassembly` of CPU code; both edit messages with `xla_messages`). A worker may run in an
environment of another jax, which has the server's dependencies and `iced-x86` only, so no module here imports
flax, click or pydantic, directly or through others. A build uses this code only through a worker process: no
module outside this package imports it.

This package imports `compile.compile_jobs` and what `compile` imports. Begin with `worker_requests`.
"""
