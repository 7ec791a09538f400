"""Real frameworks and tools on a real mount: what a user runs, unmodified, and the values read back."""
