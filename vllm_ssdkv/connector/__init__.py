"""vLLM's side of the package: the connector's two halves and the messages between them."""
