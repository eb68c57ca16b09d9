"""Modules that any room may use: files, locks, strict JSON, checked arguments, processes, text tables.

They know nothing of bundles. Imports only `errors`. Begin with `typed_json`.
"""
