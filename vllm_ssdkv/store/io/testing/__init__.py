"""Twins of an I/O engine that do nothing, fail or slow down."""
