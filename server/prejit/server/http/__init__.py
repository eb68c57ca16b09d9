"""The process of a server and its HTTP application. Begin with `server_process`, then `app`.

The page at `/` is plain HTML, CSS and JavaScript (`page/`), without a build step or other hosts. Beside the
endpoints of every client it has two of its own, `/page/models` and `/page/figures`.

Imports every room but `cli`.
"""
