"""Storage of KV: format, index, journal, DRAM frames, data files. Knows no vLLM."""
