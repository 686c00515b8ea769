"""Prompts that are measured on: held-out windows, benchmark files, prose."""
