"""Reading: the events of the responses that clients wait for, from the stream or from the log."""
