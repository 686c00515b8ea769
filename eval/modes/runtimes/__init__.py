"""What runs the target while records are made, and how fast (`mode=runtimes`)."""
