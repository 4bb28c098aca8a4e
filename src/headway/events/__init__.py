"""The journal: what a job's processes write about themselves, and how it is read back.

In come the moments of a process's life: spans, marks, steps, checkpoints, its begin and its end. Out come the same as
records, from a file that a SIGKILL at any instant, a full disk or a crash of another process cannot spoil. This room
does not know what the time was worth: that is `accounting`. It uses the standard library alone and never imports torch.

    clock       wall and monotonic time, read together
    vocabulary  every record and every activity there is
    journal     the file: writer, step cell, reader that can follow it live
    recorder    what a process calls: span, mark, steps
    process     who a process is: job, rank, launcher
    scheduler   when the platform gave the job its hardware
    node        the file in which a collector brings a node's journals together
    job         a whole job's folder, followed

Typical use::

    recorder = Recorder(Writer(path))
    recorder.record(describe(os.environ, "my-job", Clock()))
    with recorder.span("train_module_creation"):
        model = build()
    for step, batch in recorder.steps(loader):
        train(model, batch)
"""
