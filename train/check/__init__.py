"""What engines do not check of a draft's folder before they serve it: `checks.py` lists the checks, which lie by
subject beside it."""
