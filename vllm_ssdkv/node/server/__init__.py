"""The node's process: stores, connections, leases."""
