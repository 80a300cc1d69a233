"""What clients may do with files and batches, in whatever protocol they ask for it."""
