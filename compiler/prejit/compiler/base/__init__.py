"""Helpers for every package of the build side.

    suggestions        how errors show values and suggest names
    json_file          a user's JSON, read within limits
    process_errors     errors that a process answers
    python_source      names in Python source
    statement_writing  statements and envelopes, as they are signed
    stored_dtypes      the dtypes of stored weights, and all places that know them

Imports `prejit.runtime` alone.
"""
