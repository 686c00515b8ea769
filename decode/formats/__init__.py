"""Heads as others publish them, read as drafters of ours: EAGLE-3, Medusa, DFlash and DSpark."""
