"""Decoder families, a file each: `describe`, `build` and `NAMING`.

Imports `layers`. Begin with `llama`.
"""
