"""The page at `/`: chat, complete, embed and call, live figures, and what was loaded and compiled.

Imports `served` and the rooms below the server. The page is plain HTML, CSS and JavaScript of this package,
without a build step or other hosts. It talks to the same endpoints as every client.

    page_routes     its files, and the two endpoints of the page
"""
