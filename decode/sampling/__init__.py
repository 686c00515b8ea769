"""From logits to a token: warping, processors, the shared noise, and where a completion ends."""
