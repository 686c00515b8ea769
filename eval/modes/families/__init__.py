"""Draft families compared: each trained by the same loop, on as many tokens and for as long as the
others."""
