"""SGLang servers that are already running, reached by URL."""
