"""Drafts to train: language models and heads, by name."""
