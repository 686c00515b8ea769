"""Drafting without training: what was written before is the guess at what comes next."""
