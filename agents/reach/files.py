"""How many files, and so connections, a process may have open."""

import resource

FILES = 65_536  # one a connection


def raise_file_limit() -> None:
    """As many as the system lets us, up to what we can use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
