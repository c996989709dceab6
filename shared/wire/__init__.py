"""Everything that travels between processes: messages and their bytes, streams and keys, the token
log, the registry of replicas."""
