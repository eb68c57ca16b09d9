"""Bundles inside the servers of others: Ray Serve, BentoML, MLServer, Triton.

`hosted_bundle` loads a bundle as `prejit serve` does; each other file is what one of these servers imports.
"""
