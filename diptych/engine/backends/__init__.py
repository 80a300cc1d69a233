"""What a device does for the engine. Nothing else in the engine knows the device."""
