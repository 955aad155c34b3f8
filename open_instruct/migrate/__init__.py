"""Launches of other suites, translated into our flags."""
