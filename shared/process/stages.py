"""The stages by name."""

PIPELINE = ("tokenizer", "compute", "sampler")  # each request passes these, in this order
SERVING = ("gateway", *PIPELINE)  # these must run for a request to be answered
STAGES = (*SERVING, "jobs", "encoder")
