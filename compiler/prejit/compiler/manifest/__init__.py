"""The user's TOML, typed and checked: every problem of a manifest is reported at once.

Imports `targets`. Begin with `manifest.read_manifest`.
"""
