"""The process of a server and its HTTP application. Begin with `server_process`, then `app`.

The page at `/` is plain HTML, CSS and JavaScript (`page/`), without a build step or other hosts; it talks to
the same endpoints as every client.

Imports every room but `cli`.
"""
