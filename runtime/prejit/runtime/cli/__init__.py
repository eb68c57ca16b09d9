"""The command line of the runtime: each command `NAME` in `NAME_command`, and how any is run.

`prejit.runtime.__main__` calls `commands.run`. Imports everything, and nothing else of the server side
imports click. Begin with `commands`.
"""
