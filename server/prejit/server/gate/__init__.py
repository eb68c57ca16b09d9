"""What every request passes before a protocol answers it: keys, limits, hosts and origins, and errors.

May import `telemetry`, `served` and the rooms below them, and knows no API. Begin with `gate`.
"""
