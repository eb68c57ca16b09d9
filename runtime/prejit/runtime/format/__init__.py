"""The files of a bundle: what they hold, how they are read and written, and every check before they are used.

`schema` and `arrays` hold the dataclasses, `names` the media types and annotation keys, `limits` the
maximum sizes. `layout` reads files and `writing` writes them. `root` finds the bundle in `index.json`,
`copied` makes the index of a copy that lacks it, and `referrers` finds what refers to a bundle. `blobs`
hashes every byte before it is used, `opening` compares the targets with a machine, and `audit` is `prejit
verify`. `checks` holds the numbered checks, and `rules` lists them in their order. Imports `machine`, `store`
and rooms below them, and no JAX. Begin with `root`.
"""
