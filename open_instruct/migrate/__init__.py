"""Launches of open-instruct, translated into our flags."""
