"""The live view of the pipeline, and the playground."""
