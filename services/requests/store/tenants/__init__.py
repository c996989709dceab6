"""Tenants: API keys, and the limits of each tenant."""
