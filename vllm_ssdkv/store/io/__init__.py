"""Reads and writes of slots: addressed, coalesced, submitted to an engine."""
