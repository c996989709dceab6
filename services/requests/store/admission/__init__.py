"""Admission: which requests may enter the pipeline, within which bounds."""
