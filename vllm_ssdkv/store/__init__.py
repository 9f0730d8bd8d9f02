"""Where KV lives: layout, index, journal, DRAM frames, data files. Knows no vLLM."""
