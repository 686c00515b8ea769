"""What engines ask of each form of draft; one form a file, and the states that all of them read."""
