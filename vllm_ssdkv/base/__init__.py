"""Errors, sizes, metrics and small files: what every other package may use."""
