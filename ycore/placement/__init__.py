"""Which role is awake on which slot, and when that should change: frozen values and pure decisions.

Not here: the engines that sleep and wake (`roles`), and who asks them (`controller`).
"""
