"""The process of a server and its HTTP application. Begin with `server_process`, then `app`.

Imports every room but `cli`.
"""
