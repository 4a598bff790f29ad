"""The controller on one training rank: how a step gets its groups. Begin with `step`."""
