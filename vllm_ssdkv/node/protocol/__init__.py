"""What goes over the wire between an engine and a node: addresses, frames, messages, keys."""
