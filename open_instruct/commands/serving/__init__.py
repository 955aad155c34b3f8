"""`open-instruct serve` with our own endpoint: sessions that are recorded, or sent again."""
