"""The prefill worker: computes prompts and leases their KV blocks."""
