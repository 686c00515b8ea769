"""A round of decoding: what it knows, what it does, and what the host learns of it."""
