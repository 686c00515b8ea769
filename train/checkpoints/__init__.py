"""What a training can go on from after it was killed."""
