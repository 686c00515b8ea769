"""Record folders: shards, their manifest, and the codes in which p and hidden states are kept; which texts a code of
hidden states is fitted on is decided above, in `distill/stage.py`."""
