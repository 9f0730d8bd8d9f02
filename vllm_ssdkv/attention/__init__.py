"""Attention of page mode: exact over window and context, and over the pages that were chosen."""
