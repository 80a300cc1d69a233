"""The router: admission, placement, streaming, fail-over."""
