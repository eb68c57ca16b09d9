"""The commands of the server, each in the module of its name. `prejit.runtime.cli.commands` runs them."""
