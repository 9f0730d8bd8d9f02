"""Writes: frames become slots on the devices."""
