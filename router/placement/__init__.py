"""Where a request runs, and where it waits for that. Pure."""
