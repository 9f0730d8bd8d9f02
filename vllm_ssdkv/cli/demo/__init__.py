"""`ssdkv demo`."""
