"""Sparse decode: which part of a context a query needs."""
