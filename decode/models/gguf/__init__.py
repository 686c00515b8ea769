"""Models in GGUF files, as transformers has them."""
