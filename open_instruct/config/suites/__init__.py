"""Other suites' names of our flags."""
