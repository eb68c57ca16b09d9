"""The command line of the server side: each command in the module of its name, and how any is run.

`prejit.runtime.__main__` calls `commands.run`. Imports everything, and nothing else of the server side
imports click. Begin with `commands`.
"""
