"""Names that other suites have for what a flag of ours does."""
