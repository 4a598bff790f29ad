"""Loss of power, proved: real runs are recorded, and what a disk may hold after any moment of them is resumed."""
