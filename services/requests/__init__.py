"""Requests and their answers, whichever API they come by: a library of the gateway and of the
workers of batches."""
