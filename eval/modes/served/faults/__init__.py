"""Which fault makes an engine accept otherwise than we do: each is done to our own reading of the draft's folder, and
the one that counts as the engine counts is named."""
