"""Launches of open-instruct, told in our flags."""
