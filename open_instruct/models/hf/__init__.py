"""A checkpoint of Hugging Face as it lies on disk: its configuration, its files, its names."""
