"""Faults to inject into transfers. Production code imports none of it."""
