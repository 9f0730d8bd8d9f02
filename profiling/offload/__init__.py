"""Attention near storage: models of published devices, and the benchmark of ours."""
