"""Steps on disk: written whole, checked, gone on from."""
