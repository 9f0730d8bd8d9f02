"""`ssdkv bench`."""
