"""Bytes on disk: slot headers, superblocks, journal records, the manifest."""
