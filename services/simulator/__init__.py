"""The scheduler and the block manager under a clock of their own: a trace of requests replays as
fast as Python can schedule it."""
