"""Vectors from an encoder: sentences, the buckets that cover them, and the programs that run.

Imports `programs` and `text`. Begin with `encoder`.
"""
