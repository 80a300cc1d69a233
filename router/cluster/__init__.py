"""The workers: who they are, what they say, and the streams to them."""
