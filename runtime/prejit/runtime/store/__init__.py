"""Files that this machine keeps between starts: receipts of hashed files, first programs, golden answers.

They only save time: a start without them, or with damaged ones, gives the same results. The exception is the
quarantine of executables that gave wrong answers (`answers`). Imports `base` and `errors`. Begin with
`receipts`.
"""
