"""The Responses API: its bodies as chats, answers as its events, and responses that are stored."""
