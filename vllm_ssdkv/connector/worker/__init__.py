"""The worker's half of the connector, one per rank."""
