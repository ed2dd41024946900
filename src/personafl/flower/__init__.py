"""The same round over a network: everything that needs Flower (the extra `flower`)."""
