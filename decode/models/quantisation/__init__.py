"""Quantised weights: which can be read, and what quantises plain ones."""
