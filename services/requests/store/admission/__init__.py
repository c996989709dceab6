"""Admission: who may enter the pipeline, within which bounds."""
