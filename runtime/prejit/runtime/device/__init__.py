"""Arrays and executables on a device, through jaxlib.

`_jaxlib`, `_jax_parts` and `_jit_dispatch` touch private parts of jax and jaxlib. `device` holds the
client, its devices and loaded programs, `transfer` moves arrays to the host, `kernels` loads native
libraries, `portable` prepares StableHLO for a compilation, and `quick_start` makes imports
quick. `tuning` is the work behind `prejit tune`. Imports `format` and rooms below it. Begin with
`device.Device`.
"""
