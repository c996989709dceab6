"""The `penstock` command: it starts the stages and looks after them. No stage imports it."""
