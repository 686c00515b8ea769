"""A target on disk and in memory: found, checked, loaded, fingerprinted; its hidden states and its output head."""
