"""What is compiled for: [[target]] tables, the toolchain of each, environments of pinned versions.

Imports `store`. Begin with `target_table`, then `toolchain`.
"""
