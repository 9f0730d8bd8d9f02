"""FPGA kernels and hosts for near-storage attention. Empty until that part is built."""
