"""One request from admission to its end. Pure but for its session."""
