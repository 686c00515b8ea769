"""What passes cost on this machine, what a draft is worth there, and how many draft tokens pay."""
