"""Selectors, one file each."""
