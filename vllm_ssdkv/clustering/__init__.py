"""Clusters of co-activated pages (Swarm): counts, clusters, maintenance, routing, scheduling."""
