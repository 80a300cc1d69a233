"""The CPU: torch and own kernels, each proven at its first use, with a fallback."""
