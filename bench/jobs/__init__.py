"""What jobs cost, and how fast they are claimed."""
