"""Open-loop load for servers: requests at their times, the saturation curve, its knee."""
