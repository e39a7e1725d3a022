"""One function per verb: the only place that chooses task, device, ranks, printing and files."""
