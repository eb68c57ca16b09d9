"""Arrays and executables on a device, through jaxlib.

`_jaxlib` alone touches private parts of jax and jaxlib; everything else calls its functions. `device` holds
the client and its devices, `executable` a loaded program, `transfer` moves arrays to the host, `kernels`
loads libraries of native kernels, `portable` prepares StableHLO for a compilation, and `start` makes the
imports quick. `tuning` is the work behind `prejit tune`. Imports `format` and rooms below it. Begin with
`device.Device`.
"""
