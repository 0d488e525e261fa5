"""The code that makes the paper's tables, one module per kind of table."""
