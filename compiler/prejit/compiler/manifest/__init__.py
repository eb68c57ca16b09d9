"""The manifest of a user, from TOML or Python: typed, checked, every mistake reported at once.

    manifest.py      the values: begin here
    reading.py       TOML to values, and errors with lines
    tables.py        the keys of a manifest and their types
    checks.py        the values of each key (expected.py has their words)
    shape_string.py  `float32[{batch}, 128]`
    toml_lines.py    the line of each key
    specs.py         the programs that a manifest asks for
    schema.py        the JSON Schema, for editors

This package imports `base` and `targets`.
"""
