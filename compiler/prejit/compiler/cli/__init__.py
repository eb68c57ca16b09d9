"""The commands of the build side, `NAME` in `NAME_command`. `prejit.runtime.cli.commands` runs them."""
