"""`ssdkv lab reproduce`."""
