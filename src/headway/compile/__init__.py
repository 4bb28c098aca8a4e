"""What one job has compiled, kept for every job that would compile the same.

The files of torch's caches come in, under a key of all that they depend on; signed segments in a folder or an object
store come out, and in the next job the files again. This room knows nothing of checkpoints or restarts, and a failure
of it is never a failure of the job: it compiles then, as it would without.
"""
