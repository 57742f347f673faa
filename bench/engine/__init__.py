"""Speed of the engine."""
