"""Operands of kernels: block layouts, lists of blocks and pages, rows, partial states."""
