"""Drafts that start from a larger model: parts of it left out, or weights set to zero, before they are trained."""
