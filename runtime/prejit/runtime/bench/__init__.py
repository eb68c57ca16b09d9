"""`prejit bench`: measure a bundle, compare two reports, draw the page.

Imports the public face of the runtime. Begin with `measure`.
"""
