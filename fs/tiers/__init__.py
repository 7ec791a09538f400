"""Where durable bytes lie: one protocol, and what speaks it."""
