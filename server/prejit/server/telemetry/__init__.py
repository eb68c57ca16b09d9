"""Telemetry of a server for its operators: metrics and files that show them, spans, the log of requests.

May import `served` and the rooms below it.
"""
