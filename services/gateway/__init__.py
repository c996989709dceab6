"""The gateway owns what needs the client."""
