"""The stages by name."""

PIPELINE = ("tokenizer", "compute", "sampler")  # what each request passes, in this order
SERVING = ("gateway", *PIPELINE)  # what must run for a request to be answered
STAGES = (*SERVING, "jobs", "encoder")
