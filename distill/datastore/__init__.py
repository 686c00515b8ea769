"""A corpus of tokens that drafts are looked up in: `python -m distill.datastore`."""
