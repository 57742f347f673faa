"""The ways in which a process of the cluster begins."""

FORK, SPAWN = "fork", "spawn"
STARTS = (FORK, SPAWN)
