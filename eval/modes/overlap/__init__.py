"""`mode=overlap`: a simulation of decode.overlap=true, drafting while the target verifies."""
