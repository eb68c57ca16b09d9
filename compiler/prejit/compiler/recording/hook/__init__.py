"""The part of `prejit record` that runs in the processes of the program.

As `prejit.runtime.recorded.hook`, it imports no more than jax, Python's library, itself and that hook.
"""
