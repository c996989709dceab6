"""One replica as several processes, its ranks: what each loads, and how they talk."""
