"""What moves bytes: the seam, and each transport behind it."""
