"""From a dataset's name to checked rows: prompts for a run with rollouts, examples for one without.

Read `prompts` or `examples` first, then `source` (what a dataset's name means), `local_files`, `generated` and `table`.
"""
