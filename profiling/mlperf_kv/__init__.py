"""The store under the KV-cache workload of MLPerf Storage, written from its public description."""
