"""How a driver reaches its workers: local processes, Ray actors, ranks of torchrun."""
