"""The pages, which `ycore docs` prints."""
