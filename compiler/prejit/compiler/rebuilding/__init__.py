"""Rebuilding: build a bundle again from what its provenance records, and compare the two part by part.

`build_record` reads what a bundle records, `compared_parts` compares two bundles, `rebuilt` does the whole:
begin there.
"""
