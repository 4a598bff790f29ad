"""How completions are written: turns, tools, environments and agents."""
