"""The shipped model: its training, export and evaluation. Services do not import it."""
