"""From a model's name to a folder that trainer and engine can load.

Order of reading: `plan` (what a name means, cheaply), `fetch` (make it real), then `folder`, `hub`, `gguf_header`,
`gguf`, `builtin` and `cache` for one source each. `tiny` builds a model for tests.

Not here: loading weights for training or serving.
"""
