"""The paper: its lists, and the code of its tables, one module per kind."""
