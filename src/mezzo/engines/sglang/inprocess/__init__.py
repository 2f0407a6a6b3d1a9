"""SGLang started by mezzo itself: an engine in the driver, and a worker inside each of SGLang's scheduler processes."""
