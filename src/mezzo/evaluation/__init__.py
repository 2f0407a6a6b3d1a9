"""How good a model is: metrics of predictions, and rewards of generated text."""
