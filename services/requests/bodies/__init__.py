"""Bodies of any API: their fields, how they are checked, and what is said of a field that is not
taken."""
