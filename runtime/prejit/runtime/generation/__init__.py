"""Tokens from a decoder: requests, the batch of slots over one KV cache, sampling, prompt lookup.

Imports `programs` and `text`. Begin with `generate.run`, then `batch`.
"""
