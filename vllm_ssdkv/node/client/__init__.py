"""The engine's side of a node."""
