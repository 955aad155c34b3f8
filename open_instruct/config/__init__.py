"""Flags and YAML files into validated dataclass sections; no torch here."""
