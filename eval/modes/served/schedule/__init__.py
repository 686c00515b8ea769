"""From speeds measured in an engine to the draft length at each batch size, and what to paste to have it."""
