"""KV cache of vLLM on SSDs: a tiered connector and attention backend for unpatched vLLM."""

__version__ = "0.1.0"
