"""Decoder families: `describe`, `build` and `NAMING`. Those of Llama's modules share its file.

Imports `layers`. Begin with `llama`.
"""
