"""Figures: one row class, statistics over prompts, what results.json holds."""
