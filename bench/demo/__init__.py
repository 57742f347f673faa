"""`make demo`: a cluster of processes, and a customer's conversation with an agent."""
