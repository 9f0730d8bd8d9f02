"""``ssdkv bench io``: our I/O engines, fio and other ways to read and write, on the same files."""
