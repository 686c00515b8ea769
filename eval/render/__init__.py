"""Figures as tables, plots and pages."""
