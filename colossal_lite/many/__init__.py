"""Orders many trainings on few devices: jobs, policies and timetables.

May import: observe.  Read first: `timetable`.
A new policy is one function and one line in `POLICIES`.
"""
