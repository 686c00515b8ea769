"""Drafts as others publish and load them: a file for each form says its names, shapes and keys, read and written."""
