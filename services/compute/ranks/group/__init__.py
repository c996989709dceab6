"""The group: one replica that is several processes, its ranks. Rank 0 speaks to Redis and
tells the others each step. No module here loads torch.

Rank 0:

    group = open_group(settings)              # None where there is one rank only
    with group:                               # an error in here tells the others, and ends them
        group.memory_fd                       # memory of all ranks, where they are on one host; rank 0 sizes it
        group.num_threads                     # in the place of settings.num_threads: this rank's cores
        ...                                   # load
        group.identify(Loaded(fingerprint, arithmetic))   # StartupError if a rank computes otherwise
        group.send(RunStep(batch))            # to all, in order
        group.receive(rank)                   # an answer
        group.close()                         # when its work is done: the others end

The others, where `rank_of(settings)` is not 0 (launch.py has these three functions):

    with join_group(settings) as member:
        member.rank, member.memory_fd, member.num_threads
        ...                                   # load
        member.identify(Loaded(fingerprint, arithmetic))
        for command in member.commands(step_timeout_s):   # ends when rank 0 closes the group
            member.answer(...)                # if the command wants one

Each message is a dataclass of commands.py. Either side may be gone at any moment: then the watch
(watch.py) ends this process with one line, whatever its main thread does. Linux kills the ranks that
rank 0 started when the thread ends that called open_group: that is the main thread.
"""
