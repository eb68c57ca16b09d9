"""Helpers for every package of the build side: wording of errors, and strict reading of JSON.

`wording` shows values and suggests names; `json_file` reads a user's JSON within limits. This package imports
`prejit.runtime.errors` alone.
"""
