"""Figures as tables, plots and pages: columns stand in a page's file, headings that pages share in `formatting.py`."""
