"""Serve models from several shadowslice hosts behind one address."""
