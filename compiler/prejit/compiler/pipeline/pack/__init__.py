"""Packing: what a bundle holds for each target, and the bytes of its files.

`contents.pack_bundle` makes the tables and the index. `weights` and `model_layers` make the layers that all
targets share. `requirement` states what executables need of a machine. `bundle_files` writes the bytes and
imports the runtime alone. Begin with `contents`.
"""
