"""Grammars of clients, checked and compiled in processes that can be killed; and answers held
against their schemas."""
