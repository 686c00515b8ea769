"""An engine as a server of its own: started or found, asked by HTTP, counted by its metrics."""
