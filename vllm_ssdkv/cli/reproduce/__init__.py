"""`ssdkv reproduce`."""
