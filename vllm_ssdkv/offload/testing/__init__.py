"""Twins of devices that attend: faulty, throttled."""
