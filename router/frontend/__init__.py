"""What clients call: admission, validation, and the services they see."""
