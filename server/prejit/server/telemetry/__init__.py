"""What a server tells those who run it: metrics for Prometheus, spans, the log of requests.

May import `served` and the rooms below it.
"""
