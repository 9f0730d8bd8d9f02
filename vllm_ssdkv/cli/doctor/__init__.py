"""`ssdkv doctor`."""
