"""`ssdkv lab docs`."""
