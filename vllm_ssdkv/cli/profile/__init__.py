"""`ssdkv lab profile`."""
