"""The ledger: every second of a job, and of each of its ranks, in exactly one bucket.

In come records, in any number and as they are written. Out comes a `Ledger` whose parts add up to the job's wall time,
to the nanosecond, and what to do about the largest of them. This room reads no file, no clock and no environment: the
same records give the same ledger everywhere.

    rules      which bucket time goes to, what a stall is, which steps were new
    timeline   one process: records folded into pieces of time that do not overlap
    members    which processes are the job's, on one time axis, and which only launched it
    anchors    at which step a process went on that could not tell
    attempts   which processes ran together, and when each attempt began and failed
    view       one rank in one attempt: its timeline, put into buckets
    rollup     a finished process's timeline in a kilobyte
    waterfall  how ranks started together: the critical path, and what more could overlap
    publishing what others published of the job, and what that spared it
    ledger     ranks, attempts and the job, from the pieces and the rules
    advice     fixes, ranked by the points each would give back

Typical use::

    accounts = JobAccounts()
    for process, batch in JobReader(paths).poll():
        accounts.take(process, batch)
    ledger = accounts.ledger(now, alive)
    print(percent(ledger.buckets)[0])
"""
