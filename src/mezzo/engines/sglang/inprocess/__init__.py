"""SGLang started by this process."""
