"""Mirrors a run's events into TensorBoard files. Optional: the package is imported when a sink is made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from strop.errors import ConfigError
from strop.runs.events import BadLine, Event, read_lines


class TensorBoardSink:
    """Writes step metrics as "STAGE/metric" and scores as "evaluation/…".

    Args:
        folder: where the files go: a folder in the run's directory.

    Raises:
        ConfigError: the tensorboard package isn't installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            right = "Install it: pip install 'strop[tensorboard]'"
            raise ConfigError("--tensorboard", "it needs the package tensorboard", right) from None
        self._event_type, self._summary_type = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))
        self._offsets: dict[str, int] = {}  # steps made before each stage: TensorBoard has one axis for all of them
        self._last = 0
        for event in read_lines(folder.parent / "events.jsonl"):  # those of a run that is taken up again
            if not isinstance(event, BadLine) and event["kind"] in ("step", "evaluation"):
                self._place(event)

    def hear(self, event: Event) -> None:
        """Take in an event of the run; kinds that hold no numbers pass by."""
        match event["kind"]:
            case "step":
                self._write(event, {f"{event['stage']}/{name}": value for name, value in event["metrics"].items()})
            case "evaluation":
                self._write(event, {f"evaluation/{name}": float(event[name]) for name in ("score", "low", "high")})
                self._writer.flush()
            case "run" if event.get("what") in ("finished", "stopped"):
                self._writer.flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()

    def _place(self, event: Event) -> int:
        """Where an event stands on the axis: steps made so far, its own included."""
        offset = self._offsets.setdefault(event["stage"], self._last) if event["stage"] else 0
        step = offset + int(event["step"]) + int(event["kind"] == "step")
        self._last = max(self._last, step)
        return step

    def _write(self, event: Event, values: Mapping[str, float]) -> None:
        scalars = [self._summary_type.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        summary = self._summary_type(value=scalars)
        self._writer.add_event(self._event_type(wall_time=event["time"], step=self._place(event), summary=summary))
