"""What every room of the build side needs: the words of errors and strict reading of a user's JSON.

Imports only the runtime's `errors`.
"""
