"""What stays from one call to the next: runners with their caches and captures, who holds them, when they are stale."""
