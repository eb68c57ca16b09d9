"""The command line of the server: one function a command.

Imports everything. `prejit.runtime.__main__` parses the arguments. Begin with `commands`.
"""
