"""Several shadowslice hosts behind one address: models are placed and moved without loss."""
