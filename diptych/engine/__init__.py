"""The model executor: sequences, block pool, scheduler (no torch); model and runner (torch)."""
