"""An algorithm is a TRL trainer, its settings, and the few places where ycore takes part in it."""
