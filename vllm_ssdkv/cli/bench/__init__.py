"""`ssdkv lab bench`."""
