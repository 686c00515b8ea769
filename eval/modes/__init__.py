"""What mode= names: which arms meet which prompts, and what is written."""
