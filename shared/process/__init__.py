"""Parts of every process: settings from flags and the environment, kinds of errors, logs, traces,
free memory."""
