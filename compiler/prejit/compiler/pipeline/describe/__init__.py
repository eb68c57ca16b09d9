"""Descriptions that builds and recordings attach to their bundle: a list of parts (SBOM), and the provenance.

They refer to the bundle and are outside of its index, so its digest does not depend on them. Both follow from
the bundle and, for a build, from what it was made from and by, without times and names of hosts: equal builds
attach equal bytes. Begin with `attaching`.
"""
