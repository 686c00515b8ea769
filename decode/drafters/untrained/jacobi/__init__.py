"""Jacobi and lookahead decoding: guesses at later places ride along in the target's passes and are refined by them."""
