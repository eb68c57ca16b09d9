"""The manifest of a user, from TOML or Python: typed, checked, every mistake reported at once.

Begin with `manifest`, the values, then `reading`. `manifest_tables` has the keys and types, for pydantic
and for editors; `manifest_checks` checks the values. `specs` lists the programs that a manifest asks for.

`prejit suggest`: `request_log` reads a recorded load, and `chosen_buckets` chooses the buckets that pad it
least, for a budget of programs.

This package imports `base` and `targets`.
"""
