"""Launches of other suites as their users have them, and tables of what each setting is called
here.
"""
