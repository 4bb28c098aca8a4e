"""One span, against the OpenTelemetry SDK; and one record, against what the hardware and Python make of it.

headway's span is in a file, safe from a SIGKILL, when its `with` ends. The nearest that OpenTelemetry has to that is a
batch processor whose exporter serialises: the SDK's own, as JSON on one line, or OTLP's encoder, a package of its own
that takes less; neither is sent or kept. It is flushed before its queue of 2,048 is full, since dropping spans would be
cheaper, and wrong; and the flush counts, since work that is put off is still CPU taken from the job. The other rows
take from it what can be taken: an exporter that drops everything, no batching, no processor at all. None of those keeps
a span.
"""

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

from bench.measure import INSTALL, Row, Timed, cpu_us, take_turns
from headway.events.journal import Writer
from headway.events.recorder import Recorder

SPANS = 2000


def run(quick: bool) -> list[Row]:
    """The rows on spans and records."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Writer(Path(folder, "a.hwj")))
        samples = take_turns(7 if quick else 31, ours=_ours(recorder), floor=_floor(Path(folder, "raw")), **_peers())
        recorder.close()
    ours = samples["ours"]
    serialising = [
        Row("", "µs", ours, samples[name], f"OpenTelemetry, batched, {exporter}")
        for name, exporter in (("json", "the SDK's JSON to /dev/null"), ("otlp", "OTLP, not sent"))
        if name in samples
    ]
    serialising[0].name, serialising[0].at_most, serialising[0].times = "span", 3.0, 15.0
    return [
        *serialising,
        Row("", "µs", ours, samples["batch"], "OpenTelemetry, batched, exporter drops all"),
        Row("", "µs", ours, samples["simple"], "OpenTelemetry, not batched, exporter drops all"),
        Row("", "µs", ours, samples["bare"], "OpenTelemetry, no processor"),
        Row("record", "µs", [us / 2 for us in ours], samples["floor"], "floor: 20 bytes into an mmap, and their CRC"),
    ]


def _ours(recorder: Recorder) -> Timed:
    def spans() -> None:
        for _ in range(SPANS):
            with recorder.span("evaluation"):
                pass

    return lambda: cpu_us(spans, SPANS)


def _floor(path: Path) -> Timed:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 1 << 20)
    memory, pack, now = mmap.mmap(fd, 1 << 20), struct.Struct("<IIqI").pack, time.monotonic_ns

    def records() -> None:
        for at in range(0, SPANS * 20, 20):
            payload = pack(1, at, now(), 0)
            crc32(payload)
            memory[at : at + 20] = payload

    return lambda: cpu_us(records, SPANS)


def _peers() -> dict[str, Timed]:
    try:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import (
            BatchSpanProcessor,
            ConsoleSpanExporter,
            SimpleSpanProcessor,
            SpanExporter,
            SpanExportResult,
        )
    except ImportError:
        raise SystemExit(f"the OpenTelemetry SDK is missing: {INSTALL}") from None

    def one_line(span: Any) -> str:
        return f"{span.to_json(indent=None)}\n"

    class Drop(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    def timed(make: Callable[[], object] | None) -> Timed:
        provider = TracerProvider()
        if make:
            provider.add_span_processor(make())
        tracer = provider.get_tracer("bench")

        def spans() -> None:
            for _ in range(SPANS):
                with tracer.start_as_current_span("evaluation"):
                    pass
            provider.force_flush()

        return lambda: cpu_us(spans, SPANS)

    null = open(os.devnull, "w")
    peers = {
        "batch": timed(lambda: BatchSpanProcessor(Drop())),
        "json": timed(lambda: BatchSpanProcessor(ConsoleSpanExporter(out=null, formatter=one_line))),
        "simple": timed(lambda: SimpleSpanProcessor(Drop())),
        "bare": timed(None),
    }
    try:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    except ImportError:
        return peers

    class Otlp(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            encode_spans(spans).SerializeToString()
            return SpanExportResult.SUCCESS

    return peers | {"otlp": timed(lambda: BatchSpanProcessor(Otlp()))}
