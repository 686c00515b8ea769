"""Keys of config.json that engines guess where they are absent, or that contradict the draft; one form a file."""
