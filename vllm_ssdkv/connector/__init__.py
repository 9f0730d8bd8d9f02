"""What vLLM talks to: the connector's two halves and what passes between them."""
