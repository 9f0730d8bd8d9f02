"""``ssdkv lab fpga``: estimate, simulate and synthesise the kernels that attend near storage."""
