"""`prejit suggest`: the buckets that pad a recorded load least, for a budget of programs.

`request_log` reads what was recorded; `chosen_buckets` chooses sizes for each count of them and splits the
budget over the axes. Imports `manifest`. Begin with `chosen_buckets`.
"""
