"""Results by key: what decides a result, and the directory that keeps it.

Imports `prejit.runtime` alone. Begin with `key`, then `cache`.
"""
