"""Which machines of a fleet a bundle serves, and the fewest targets that would serve the rest.

Imports `machine`. Begin with `report.explain_fleet`.
"""
