"""One forward pass for several points in weight space."""
