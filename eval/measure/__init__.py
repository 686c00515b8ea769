"""What is measured, and how: timed runs, component times, alpha, losslessness."""
