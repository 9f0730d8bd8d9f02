"""Storage nodes: a store with an address, which the engines of a host or of several share."""
