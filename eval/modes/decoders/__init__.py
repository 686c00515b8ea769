"""Decoders compared: every way of ours against every peer's, cell by cell, on one target and draft."""
