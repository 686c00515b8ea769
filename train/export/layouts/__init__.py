"""How drafts lie in folders that engines load, one layout a file."""
