"""Metrics on their way to vLLM."""
