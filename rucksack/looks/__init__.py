"""Look at what senses predict: a verb a file."""
