"""Who may call what in a running cluster."""
