"""What a person gives wrongly: one line, exit code 2, nothing half-written."""
