"""How completions are scored: reward functions, judges, reward models, teachers, programs."""
