"""Stores that many machines share, behind the one on this machine.

`layered.LayeredStore` is the `Store` of a build that has some. `settings` reads which ones it has, `entry` is
what a result looks like there and who signed it, and `place.Place` is the interface of what holds the bytes:
`objects` for HTTP, object stores and directories, `registry` for OCI registries.
"""
