"""Tiny random models of vLLM's registry, started for real: which modes serve which."""
