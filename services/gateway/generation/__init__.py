"""A response on its way through the pipeline: submitted, read from its stream or log, taken over,
cancelled."""
