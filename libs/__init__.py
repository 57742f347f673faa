"""Libraries of the services: common, engine, text, worker. They never import `services`."""
