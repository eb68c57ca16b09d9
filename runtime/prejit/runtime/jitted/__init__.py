"""`jit`: a decorator like jax.jit that takes executables from a bundle where one fits the call.

`decorator` is the public face. `jit_call` binds a call to the function's parameters, `jit_program_choice`
finds the program that takes it, and `returned` says what the results are made into. jaxlib dispatches later
calls of the same signature (`device._jit_dispatch.Dispatch`).
"""
