"""Arrays and executables on a device, through jaxlib.

`executable` is the only module that touches private parts of jax and jaxlib. Imports `format`. Begin with
`executable.Device`.
"""
