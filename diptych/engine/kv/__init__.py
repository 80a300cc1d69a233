"""The memory of the KV cache, and the layout that two workers must share."""
