"""`ssdkv plan`."""
