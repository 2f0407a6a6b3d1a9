"""SGLang servers that somebody else started, by URL."""
