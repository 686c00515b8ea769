"""What is drafted in a round: trees of tokens, and the plans they grow by."""
