"""The shipped test kit: virtual time, fakes of engines, learners and runners, a scripted model, whole runs as child
processes, and network faults.
"""
