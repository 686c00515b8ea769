"""What a run reads: prompts, conversations, earlier texts."""
