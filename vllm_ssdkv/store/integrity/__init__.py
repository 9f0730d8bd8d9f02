"""Checksums, encryption and keys of slots."""
