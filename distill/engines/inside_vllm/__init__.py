"""Files that run in vLLM's environment, by path: they import nothing of ours but each other."""
