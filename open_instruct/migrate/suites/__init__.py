"""Launches of other suites, and tables of what each setting is called here."""
