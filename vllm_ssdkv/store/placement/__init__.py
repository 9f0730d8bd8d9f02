"""Placement: on which devices a slot lies, and how that changes."""
