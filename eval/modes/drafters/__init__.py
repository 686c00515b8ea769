"""Ways to draft compared: which is the fastest for which text, beside transformers' and vLLM's prompt lookup."""
