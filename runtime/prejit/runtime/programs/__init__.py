"""The programs of a bundle, ready to run: loaded from the bundle, or compiled here as a fallback.

May import `device` and the rooms below it. Begin with `ready.Programs`: it makes each program ready when it
is first used, in the foreground or in a background thread, and reports how.

    ready           programs by name, their weights on the device, and how each was obtained
    local           the fallback: compile a portable program on this machine
    compile_cache   the files that keep what `local` compiled
    weights         the weights layer as NumPy arrays
    calls, pytree   call a user's program with nested arrays
"""
