"""HTTP: the server, its protocol and middleware, keys, bodies and errors."""
