"""Figures and what results.json holds: their fields in `schema.py`, their values in `figures.py`, what they mean in
`document.py`, statistics over prompts."""
