"""`mode=exits`: behind which of its layers a target should be left to draft for itself."""
