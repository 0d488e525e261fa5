"""Edits of senses: the lines people type, and edits lent to another model."""
