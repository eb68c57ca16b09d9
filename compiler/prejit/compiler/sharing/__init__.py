"""Stores that many machines share, behind the one on this machine.

`layered.LayeredStore` is the `Store` of a build that has some. `sharing_settings` reads which ones it has,
and `shared_result` is what a result looks like there and who signed it; `leases` say who makes one.
`remote.Remote` is the interface of what holds the bytes: `objects` for HTTP, object stores and directories,
`oci_registry` for OCI registries. These three import nothing else of the build side.
"""
