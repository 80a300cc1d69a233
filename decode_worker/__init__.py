"""The decode worker: pulls proven KV and runs continuous batching."""
