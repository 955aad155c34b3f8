"""The Hugging Face hub: the card of a model, and its upload."""
