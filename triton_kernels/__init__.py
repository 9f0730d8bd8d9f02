"""GPU kernels of page mode, in Triton: attention over paged KV, merging, packing, scattering.

Importing a module of this package imports Triton; importing the package alone does not. Every
kernel also runs in Triton's interpreter on CPU tensors when ``TRITON_INTERPRET=1`` is in the
environment before Triton is first imported: that is how they are tested without a GPU.
"""
