"""A transport library's agents, and the process each runs in."""
