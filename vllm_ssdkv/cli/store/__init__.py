"""`ssdkv ls`, `info`, `rm`, `fsck`, `resume`, `quota`."""
