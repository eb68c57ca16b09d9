"""The programs of a bundle, made ready when they are first wanted.

`programs` loads executables, or compiles portable programs and keeps the results (`compile_cache`). Imports
`device`. Begin with `programs`.
"""
