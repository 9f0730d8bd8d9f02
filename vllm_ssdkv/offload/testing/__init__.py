"""Twins of devices that attend: noop, faulty, throttled."""
