"""The target in a server that speaks OpenAI's protocol: what it is asked, what it answers, and whether it fits."""
