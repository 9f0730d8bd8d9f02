"""`ssdkv ls`, `inspect`, `rm`, `fsck`, `resume`, `quota`."""
