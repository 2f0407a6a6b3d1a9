"""Models that SGLang does not have: it finds them here through SGLANG_EXTERNAL_MODEL_PACKAGE."""
