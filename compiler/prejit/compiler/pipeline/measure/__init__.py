"""Measuring on this machine: how fast and how exact the results of a build are."""
