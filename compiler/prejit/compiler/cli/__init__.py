"""The command line of the build side. Begin with `run`; each command has a module of its own."""
