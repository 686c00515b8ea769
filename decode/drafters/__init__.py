"""Draft families: one file each, one module with a training and a decoding face."""
