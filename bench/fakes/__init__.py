"""Fake workers that cost the router's machine as little as possible."""
