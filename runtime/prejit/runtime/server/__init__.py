"""`prejit serve`: an HTTP server in front of the engines of bundles (extra `prejit[server]`).

`process` runs it, `app` puts its parts together, and each other module or room answers one family of paths.
It may import every room but `cli`, which alone imports it.
"""
