"""`ssdkv docs`."""
