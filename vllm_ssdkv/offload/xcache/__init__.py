"""X-cache: a share of the requests is stored as inputs of the QKV projection (HILOS, H-2)."""
