"""What two or more stages must agree on. Imports no stage, and never torch."""
