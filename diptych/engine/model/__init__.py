"""What a checkpoint is: its config, its weights, the decoder made of them."""
