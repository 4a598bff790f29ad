"""From a model's name to a folder that trainer and engine can load.

Read `names` first (what a name means, without loading anything), then `fetch` (download or convert it).
"""
