"""Masks for any method that wants them: how dense each layer is, which positions, when they change."""
