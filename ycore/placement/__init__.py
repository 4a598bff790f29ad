"""Placement: which role is awake on which slot, and when that changes. Pure decisions: no engine, process or clock."""
