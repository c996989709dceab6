"""Records in Redis and in files: responses, batches, files, prompt modules, tenants."""
