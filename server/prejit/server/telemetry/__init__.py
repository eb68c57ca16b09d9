"""Telemetry of a server for its operators: metrics for Prometheus, spans, the log of requests.

May import `served` and the rooms below it.
"""
