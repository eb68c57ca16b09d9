"""Which machines of a fleet a bundle serves, and the fewest targets that would serve the rest.

A fleet is a directory of fingerprints, as `prejit fingerprint` writes them. `fleet_machines` reads it and is
the only module here that does IO, but for `channel_rollout`, which moves a tag; `fleet_report` matches
machines with targets; `additions` chooses the fewest targets to add. Begin with `fleet_report.explain_fleet`.
"""
