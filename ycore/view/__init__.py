"""What a run tells of itself: its numbers, what a person sees while it goes on, and the picture at the end.

Order of reading: `metrics`, `follow`, `progress`, `curve`; `passk` is the estimate that an evaluation reports.

Not here: taking the measurements (`roles`, `controller`), and the summary (`run_folder.summary`).
"""
