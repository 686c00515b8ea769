"""What all stages share: errors, configuration, command line, run folders, progress."""
