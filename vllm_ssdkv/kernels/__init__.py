"""Kernels of page mode behind one interface, on the CPU and on GPUs."""
