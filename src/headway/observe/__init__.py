"""What a ledger looks like: on a terminal, as JSON, as a page, as a trace.

In comes a `Ledger`; out comes text. This room decides nothing about time: every figure it shows is in the ledger.

    summary    the report as plain data, which the others show
    terminal   one screen
    html       one self-contained page
    perfetto   a Chrome trace, one track a rank
    palette    one colour and one label for each bucket

Typical use::

    report = summary(ledger)
    Console().print(render(report))
"""
