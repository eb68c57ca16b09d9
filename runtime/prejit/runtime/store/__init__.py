"""What this machine keeps between starts: receipts of hashed files and the programs that were used first.

Every file here only saves time: a start without it, or with a damaged one, gives the same results. Imports
`base`. Begin with `receipts`.
"""
