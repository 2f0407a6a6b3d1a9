"""Noise, perturbation and update of the trained tensors in plain torch: the reference."""
