"""What is drafted in a round: trees of tokens, and the plans they grow by."""

MOST_NODES = 1024
"""Draft tokens of a round, at most."""
