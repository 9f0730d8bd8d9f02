"""Devices: found, opened, locked, measured, watched."""
