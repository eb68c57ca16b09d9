"""The manifest of a user, from TOML or Python: typed, checked, every mistake reported at once.

Begin with `manifest`, the values, then `reading`. `manifest_tables` has the keys and types, for pydantic
and for editors; `manifest_checks` checks the values. `specs` lists the programs that a manifest asks for.
This package imports `base` and `targets`.
"""
