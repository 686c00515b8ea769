"""A trained draft as a folder that others load."""
