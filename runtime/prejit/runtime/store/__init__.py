"""Files that this machine keeps between starts. They only save time, but for quarantines of executables.

Imports `base` and `errors`. Begin with `receipts`.
"""
