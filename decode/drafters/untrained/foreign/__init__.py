"""A draft LM with another tokenizer than the target's."""
