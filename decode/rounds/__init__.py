"""A round of decoding: what it knows, what it does, what the host learns of it, and which request sits in which row;
when waiting ones are seated is decided above, in `decode/loop.py`."""
