"""Processes that join, drain, restart and die: routers, regions, and what a dead process leaves behind."""
