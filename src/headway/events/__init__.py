"""The journal: what a job's processes write about themselves, and how it is read back."""
