"""The programs of a bundle, ready to run: loaded, or compiled here. Begin with `ready.Programs`.

Imports `device` and the rooms below it.
"""
