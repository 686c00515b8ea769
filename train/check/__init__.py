"""What engines do not check of a draft's folder before they serve it."""
