"""Tokens from a decoder. Begin with `generate.run`: it feeds requests into `slots.Slots`.

Only bundles and rooms above them import it; it imports `programs`, `text` and rooms below.
"""
