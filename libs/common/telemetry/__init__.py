"""A process's reports of itself: metrics, logs, traces. It imports nothing of `libs` but this package."""
