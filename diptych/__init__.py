"""Diptych: what the roles of the cluster share."""

__version__ = "0.1.0"
