"""The processes of a weight sync, and what is measured in them."""
