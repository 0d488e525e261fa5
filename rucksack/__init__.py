"""What the six scripts on top stand on."""
