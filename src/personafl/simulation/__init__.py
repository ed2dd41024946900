"""The round on one machine, all clients at once."""
