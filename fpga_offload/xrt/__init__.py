"""Kernels on a card, by XRT."""
