"""``ssdkv pool``: nodes of a static list, started, asked, drained and ended together."""
