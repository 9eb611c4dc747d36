"""Files of a run: paths, durable writes, JSON lines, checkpoints, and the lock of a folder."""
