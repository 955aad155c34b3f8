"""The Hugging Face hub: what is said of a model there, and how it gets there."""
