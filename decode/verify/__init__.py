"""Which draft tokens stand: one rule a file."""
