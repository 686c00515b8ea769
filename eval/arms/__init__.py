"""Ways of continuing prompts that are compared: ours, transformers', vLLM's."""
