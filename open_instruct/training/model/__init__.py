"""Preparation of OLMo-core's model for training, the same for every backend; and its forward
pass.
"""
