"""Which tokens run next and whose blocks hold them. Pure; no torch."""
