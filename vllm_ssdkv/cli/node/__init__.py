"""``ssdkv node``: keys of nodes, nodes, and how they are."""
