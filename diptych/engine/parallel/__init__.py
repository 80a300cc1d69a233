"""One engine in several processes: a leader that is told what to run, and its followers."""
