"""Anthropic's Messages: their bodies as chats, and answers as their events."""
