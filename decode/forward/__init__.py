"""Passes of a causal LM over a slot cache: masks, attention, packed layers, captures."""
