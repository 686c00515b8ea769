"""`mode=profile`: where the time of a round goes."""
