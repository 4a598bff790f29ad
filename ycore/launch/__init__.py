"""Start and watch the processes of a run on this machine, and leave none of them behind. Read `launcher` first."""
