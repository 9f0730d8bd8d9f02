"""A decoder without vLLM: Hugging Face models with random weights on this package's store.

The worker, its steps, kernels and selectors are those that vLLM runs; what vLLM's scheduler and
block manager do is done here, for requests that are all decoded at once.
"""
