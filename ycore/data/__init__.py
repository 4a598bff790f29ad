"""From a dataset's name to checked rows. Begin with `prompts` (runs with rollouts) or `examples` (runs without)."""
