"""Moving KV blocks between two processes, and proving it."""
