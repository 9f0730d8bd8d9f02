"""``ssdkv explain``, and the list of messages that it looks in."""
