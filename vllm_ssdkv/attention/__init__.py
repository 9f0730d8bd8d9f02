"""Attention of page mode: kernels, exact attention over window and context, vLLM's backend."""
