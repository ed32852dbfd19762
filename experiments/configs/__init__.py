"""Named experiments: one typed function each."""
