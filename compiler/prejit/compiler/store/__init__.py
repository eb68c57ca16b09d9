"""Results by key: the digest of everything that decides a result, and the store that keeps it.

`build_cache_key.Key` lists the named ingredients of a result. `prejit_code` makes ingredients of prejit's own
code, and `lowering_settings` of jax's settings. `store_interface.Store` is the interface that a build uses;
`directory_store.DirectoryStore` is the one on this machine, and `cached_files` are its files.

This package imports `prejit.runtime` alone. Begin with `build_cache_key`, then `store_interface`.
"""
