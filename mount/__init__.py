"""What a person runs: the command, the supervisor that owns the mount, the worker that serves it."""
