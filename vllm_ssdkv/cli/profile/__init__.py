"""`ssdkv profile`."""
