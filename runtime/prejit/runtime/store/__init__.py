"""Files that this machine keeps between starts: receipts of hashed files, and programs used first.

They only save time: a start without them, or with damaged ones, gives the same results. Imports `base` and
`errors`. Begin with `receipts`.
"""
