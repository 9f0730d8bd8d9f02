"""Residency in DRAM: frames, selected pages, summaries, and their eviction."""
