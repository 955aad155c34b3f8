"""Small real models of package indexes: which there are, and how one becomes a folder."""
