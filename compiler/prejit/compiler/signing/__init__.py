"""Signing: signatures of finished bundles, which cosign and the OpenSSF's model signing verify; channels.

Needs `cryptography`. Imports the runtime alone: its room `trust` verifies, and both share the bytes of the
statements. Begin with `bundle_signing`.
"""
