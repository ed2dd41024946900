"""Personalised federated learning: simulate, compare, deploy."""

__version__ = "0.1.0"
