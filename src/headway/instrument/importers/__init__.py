"""What other tools have measured, told again as journals: from then on a job like any other.

In come trace files that another tool wrote while a job ran. Out comes a job in the home, whole or not at all. This room
does not know what the time was worth, and adds nothing that the traces do not say: what they leave out stays unknown.

    torchtitan          the files of one job, found, ordered into processes and told
    torchtitan_trace    one file's lines, read, put in order and placed on one time axis
    torchtitan_journal  one process's lines, told as its journal

Typical use::

    told = import_traces([Path("outputs")], settings.home_folder, job="llama")
    print(told.job, told.steps, told.problem)
"""
