"""Texts in which the end of another one is found again."""
