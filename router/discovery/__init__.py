"""Where the workers are: a source of whole sets of addresses, chosen once at start."""
