"""Existence: which slot holds which block, and the journal that remembers it."""
