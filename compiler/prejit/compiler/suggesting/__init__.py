"""`prejit suggest`: the buckets that pad a recorded load least, for a budget of programs.

    read the log -> sizes of each axis for each count -> the counts that fit the budget -> compare

`sizes` solves one axis exactly, `buckets` combines the axes of a decoder or an encoder, `log` reads what
was recorded, and `seconds` estimates compile times from the report of a build. Imports `manifest`. Begin
with `buckets`.
"""
