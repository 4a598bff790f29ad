"""From a model's name to a folder that can be loaded. Begin with `names` (what a name means), then `fetch`."""
