"""Sizing: what a machine gives for a model and a workload, and whether that is what it gives."""
