"""`ssdkv top` and `ssdkv dashboard`."""
