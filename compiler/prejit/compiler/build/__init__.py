"""The line of a build: plan, lower, compile, pack, write.

Imports every other room of the build side. Begin with `build`.
"""
