"""Which machines of a fleet a bundle serves, and the fewest targets that would serve the rest.

A fleet is a directory of fingerprints, as `prejit fingerprint` writes them. The runtime's `fleet_machines`
reads it; `channel_rollout` moves the tag that it loads: no other module here does IO. `fleet_report` matches
machines with targets, which `machine_groups` groups; `missing_targets` chooses the fewest targets to add.
Begin with `fleet_report.explain_fleet`.
"""
