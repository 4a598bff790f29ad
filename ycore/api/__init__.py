"""What Python users and the command call."""
