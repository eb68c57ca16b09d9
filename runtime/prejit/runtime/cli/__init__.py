"""The command line of the server: one function a command, options in `parser`.

`prejit.runtime.__main__` finds the function of a command in `parser.COMMANDS` and calls it with the parsed
options. Imports everything. Begin with `generate`.
"""
