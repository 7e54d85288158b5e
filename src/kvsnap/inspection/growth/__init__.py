"""How large a cache gets: of a file, a live model, or a configuration alone."""
