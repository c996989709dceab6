"""Code that two or more stages must agree on, in three packages. Imports no stage, and never torch.

process/   what every process has: settings, errors, logs, traces
model/     what a model and a request's parameters are: files, grammars, the decision
wire/      what travels: messages, streams, the token log, and how a stage meets the others
"""
