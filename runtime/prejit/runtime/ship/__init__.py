"""Bundles on the way: references, what holds bundles elsewhere, transfers, and the store of this machine."""
