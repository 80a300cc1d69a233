"""A worker of both roles on one engine and one pool; which of them it has can be changed."""
