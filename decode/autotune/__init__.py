"""What passes cost on this machine, what a draft is worth there, and the plan that pays."""
