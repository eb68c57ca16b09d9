"""The commands of the build side, each in the module of its name. `prejit.runtime.cli.commands` runs them."""
