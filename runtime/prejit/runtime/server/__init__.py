"""`prejit serve`: an HTTP server in front of the engines of bundles (extra `prejit[server]`).

`process` runs it, `app` puts its parts together, and each other module or room answers one family of paths. Only the
command line imports it. It may import every room but `cli`, and nothing of the server side imports it back.
"""
