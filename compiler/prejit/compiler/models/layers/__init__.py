"""Layers that model families share, and the forms in which kernels compute them.

Imports `native`. Begin with `layer_config`, then `linear`.
"""
