"""The commands of the server, `NAME` in `NAME_command`. `prejit.runtime.cli.commands` runs them."""
