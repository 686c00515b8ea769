"""What passes cost on this machine, what a draft is worth there, and how many draft tokens pay:
`budget.py` chooses, `experience.py` says when drafting is given up and tried again."""
