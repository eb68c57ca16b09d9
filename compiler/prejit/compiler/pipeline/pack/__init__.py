"""Packing and writing: what a bundle holds for each target, the bytes of its files, its descriptions."""
