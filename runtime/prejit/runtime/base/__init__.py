"""What every room needs: files, digests, strict JSON, checked arguments, processes, tables of text.

Imports only `errors`. Nothing here knows what a bundle is. Begin with `typed_json`.
"""
