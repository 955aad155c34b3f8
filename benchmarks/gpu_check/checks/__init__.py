"""The checks: each module has `check(findings, work, rehearse)`; listed.py says in which order they
run.
"""
