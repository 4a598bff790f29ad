"""Whole runs by name, one YAML file each. Not here: any code; `ycore.config.recipe_files` reads them."""
