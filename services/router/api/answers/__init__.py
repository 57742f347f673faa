"""How a body becomes requests, and their events one answer, whatever the API. Knows no HTTP connection."""
