"""The bundles that a server serves: loaded in a thread, found by name, checked again while it runs.

May import `engine` and `grammar`. Begin with `served`.
"""
