"""What runs a target for records: transformers in this process, or vLLM in one of its own."""
