"""Identity of a model: digest of its weights, settings that change its KV."""
