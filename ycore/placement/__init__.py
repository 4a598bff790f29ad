"""Which role is awake on which slot, and when that should change: frozen values and pure decisions.

Order of reading: `placement`, `words`, `load`, `moves`, `division`, `allocator`; `levels` is how deep an engine sleeps.

Not here: the engines that sleep and wake (`roles`), and who asks them (`controller`).
"""
