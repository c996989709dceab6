"""The endpoints, a room for each API. None of them knows another."""
