"""``ssdkv lab bench io``: our I/O engines, fio and other ways, on the same files."""
