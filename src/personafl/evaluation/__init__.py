"""Numbers, and what is made of them."""
