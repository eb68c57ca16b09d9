"""Every check of a bundle's files, numbered as in docs/bundle-format.md. No file access, no JAX.

`oci` checks the index, the manifests and their descriptors; `config` the program table; `layers`,
`safetensors` and `elf` the layers; `signatures` what each kind of program takes and returns. Imports
`format.schema` and the modules beside it. Begin with `oci`.
"""
