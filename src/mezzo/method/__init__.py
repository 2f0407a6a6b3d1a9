"""The training method as values: noise, spaces, objectives, estimators, optimizers. No model is touched here."""
