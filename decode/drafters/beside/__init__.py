"""Drafting beside the target: ahead of its verdict, in a thread of its own, on a device of its own."""
