"""The Responses API's endpoints."""
