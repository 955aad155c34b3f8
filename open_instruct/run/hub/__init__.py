"""The Hugging Face hub: the upload of a model."""
