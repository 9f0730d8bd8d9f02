"""I/O engines behind one protocol."""
