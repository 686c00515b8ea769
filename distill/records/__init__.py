"""Record folders: shards, their manifest, and the codes in which p and hidden states are kept."""
