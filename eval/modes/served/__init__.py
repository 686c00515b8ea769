"""Drafts served by an engine: its counters and speed beside ours, and what to paste to serve them so."""
