"""A model that a test of the configuration finds. No worker loads it."""
