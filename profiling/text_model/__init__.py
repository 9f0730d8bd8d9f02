"""A small trained language model from the package index, for claims about real text."""
