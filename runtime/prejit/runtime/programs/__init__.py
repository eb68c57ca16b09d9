"""The programs of a bundle, ready to run: loaded, or compiled here. Begin with `ready_programs.Programs`.

Imports `device` and the rooms below it.
"""
