"""The web page: one file that runs the whole model without a server."""
