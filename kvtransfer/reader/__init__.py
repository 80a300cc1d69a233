"""The side that reads: pairs, pulls and their reads, quarantine."""
