"""Drafts in an engine of somebody else: what is accepted there and how fast it is, beside ours on the same prompts."""
