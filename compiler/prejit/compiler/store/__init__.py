"""Results by key: the digest of everything that decides a result, and the store that keeps it.

`key.Key` lists the named ingredients of a result. `code` makes ingredients of prejit's own code.
`interface.Store` is the interface that a build uses; `directory.DirectoryStore` is the one on this machine
(`files` and `blobs` are its parts).

This package imports `prejit.runtime` alone. Begin with `key`, then `interface`.
"""
