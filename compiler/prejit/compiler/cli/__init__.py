"""The commands of the build side. `prejit.runtime.cli.commands` finds and runs them."""
