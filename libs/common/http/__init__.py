"""HTTP below the routes: connections, malformed messages, who may call, and every service's admin port.

Must not import services: the public routes and the OpenAI shapes are the router's.
"""
