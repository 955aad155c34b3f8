"""Small models and made-up data: for tests, demos and newcomers."""
