"""Which machines of a fleet a bundle serves, and the fewest targets that would serve the rest.

A fleet is a directory of fingerprints, as `prejit fingerprint` writes them. `machines` reads it and is the
only module here that does IO; `report` matches machines with targets; `candidates` lists targets that could
be added, `additions` chooses the fewest of them with `cover`. Imports `machine`. Begin with
`report.explain_fleet`.
"""
