"""From a dataset's name to prompts with their columns, and the order in which a run draws them.

Order of reading: `prompts` (the whole of it), `columns` (rows to prompts), `order`; then one file a source:
`local_files`, `tasks`, `gym`, `hub`; `table` and `generator_name` are what they share.

Not here: tokens, rewards, and who draws which prompt.
"""
