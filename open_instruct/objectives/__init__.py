"""Objectives of training, one file each."""
