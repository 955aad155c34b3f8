"""What every room stands on: errors, records, the table of metrics, text, files, families of
models.
"""
