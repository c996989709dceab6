"""The loop, and what it begins with: the engine, and the first steps on a GPU."""
