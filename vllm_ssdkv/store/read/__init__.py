"""Reads: prefix hits, streamed contexts, selected pages."""
