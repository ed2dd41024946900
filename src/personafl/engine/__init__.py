"""One round of a federation: sampling, local training, admission, aggregation, and what it costs."""
