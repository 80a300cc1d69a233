"""Who clients are: by a key from a file, or by a token that an issuer signed."""
