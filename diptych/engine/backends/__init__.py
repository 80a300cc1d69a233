"""What the engine knows of devices: one backend, chosen once at start."""
