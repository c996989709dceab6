"""Intake: prompts are admitted, and a request that may have killed a replica is kept apart."""
