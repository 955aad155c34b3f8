"""What is done to a model of OLMo-core before it learns, on any backend; and its forward pass."""
