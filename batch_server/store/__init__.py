"""What the batch server keeps, in one database."""
