"""The rollout store: one Parquet file a batch, every token of every attempt in it; and the journal of attempts that
finished before their batch was complete. A file is verified by the checksums of its pages when it is read.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from strop.errors import RunError
from strop.rollouts import ExpertChoices, Failed, FailureKind, FinishReason, Group, ModelCall, Rollout, Scored, Task
from strop.runs.files import written_whole

_CALL = pa.struct(
    [
        ("parent", pa.int32()),
        ("prompt", pa.list_(pa.int32())),
        ("tokens", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("cached", pa.int32()),
        ("started", pa.float64()),
        ("ended", pa.float64()),
        ("experts", pa.struct([("layers", pa.int32()), ("per_token", pa.int32()), ("ids", pa.binary())])),
        ("constrained", pa.bool_()),
    ]
)
SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("group_id", pa.string()),
        ("used", pa.string()),  # "trained", "evaluation", or why the group was left out
        ("step", pa.int32()),
        ("task_id", pa.string()),
        ("environment", pa.string()),
        ("member", pa.int32()),
        ("seed", pa.int64()),
        ("tries", pa.int32()),
        ("forks", pa.int32()),
        ("reward", pa.float64()),
        ("solved", pa.bool_()),
        ("failure_kind", pa.string()),
        ("failure_reason", pa.string()),
        ("metrics", pa.string()),
        ("seconds", pa.string()),
        ("transcript", pa.string()),
        ("task", pa.string()),
        ("calls", pa.list_(_CALL)),
        ("started", pa.float64()),
        ("ended", pa.float64()),
    ]
)


def write_groups(path: Path, groups: Sequence[tuple[Group, str]], state: Mapping[str, Any]) -> None:
    """Store the groups that ended since the last batch, whole or not at all.

    Args:
        path: the batch's file.
        groups: each with its use: "trained", "evaluation", or why it was left out.
        state: of the collector after this batch (JSON values); comes back from `read_state`.

    Raises:
        RunError: the disk is full or the folder can't be written.
    """
    rows = [_row(group, rollout, used) for group, used in groups for rollout in group.rollouts]
    table = pa.Table.from_pylist(rows, schema=SCHEMA.with_metadata({"strop": json.dumps(dict(state))}))
    with written_whole(path) as beside:
        pq.write_table(table, beside, compression="zstd", write_page_checksum=True)


def read_groups(path: Path) -> list[tuple[Group, str]]:
    """The groups of a batch file in stored order, each with its use.

    Raises:
        RunError: the file is missing, cut short, or changed.
    """
    groups: dict[str, tuple[Group, str]] = {}
    for row in _read(path).to_pylist():
        if row["group_id"] not in groups:
            task = json.loads(row["task"])
            task["messages"], task["tools"] = tuple(task["messages"]), tuple(task["tools"])
            groups[row["group_id"]] = (Group(row["group_id"], Task(**task), [], row["step"]), row["used"])
        groups[row["group_id"]][0].rollouts.append(_rollout(row))
    return list(groups.values())


def read_state(path: Path) -> dict[str, Any]:
    """The collector's state that a batch file carries; errors as in `read_groups`."""
    state: dict[str, Any] = json.loads(_read(path, columns=["step"]).schema.metadata[b"strop"])
    return state


def _read(path: Path, columns: list[str] | None = None) -> pa.Table:
    try:
        return pq.read_table(path, columns=columns, page_checksum_verification=True)
    except FileNotFoundError:
        raise RunError(f"{path} is missing.") from None
    except (pa.ArrowException, OSError) as error:
        raise RunError(f"{path} is damaged: {error}") from error


def _row(group: Group, rollout: Rollout, used: str) -> dict[str, Any]:
    scored = rollout.ending if isinstance(rollout.ending, Scored) else None
    failed = rollout.ending if isinstance(rollout.ending, Failed) else None
    return {
        "rollout_id": rollout.id,
        "group_id": group.id,
        "used": used,
        "step": group.step,
        "task_id": rollout.task_id,
        "environment": rollout.environment,
        "member": rollout.member,
        "seed": rollout.seed,
        "tries": rollout.tries,
        "forks": rollout.forks,
        "reward": scored.reward if scored else None,
        "solved": scored.solved if scored else None,
        "failure_kind": failed.kind.value if failed else None,
        "failure_reason": failed.reason if failed else None,
        "metrics": json.dumps(dict(scored.metrics) if scored else {}),
        "seconds": json.dumps(rollout.seconds),
        "transcript": json.dumps(rollout.transcript),
        "task": json.dumps(task_dict(group.task)) if rollout is group.rollouts[0] else None,
        "calls": [_call_dict(call) for call in rollout.calls],
        "started": rollout.started,
        "ended": rollout.ended,
    }


def _rollout(row: Mapping[str, Any]) -> Rollout:
    ending: Scored | Failed | None = None
    if row["failure_kind"] is not None:
        ending = Failed(FailureKind(row["failure_kind"]), row["failure_reason"])
    elif row["reward"] is not None:
        ending = Scored(row["reward"], json.loads(row["metrics"]), row["solved"])
    return Rollout(
        id=row["rollout_id"],
        task_id=row["task_id"],
        environment=row["environment"],
        member=row["member"],
        seed=row["seed"],
        calls=[_call(call) for call in row["calls"]],
        transcript=json.loads(row["transcript"]),
        ending=ending,
        tries=row["tries"],
        forks=row["forks"],
        seconds=json.loads(row["seconds"]),
        started=row["started"],
        ended=row["ended"],
    )


def _call_dict(call: ModelCall) -> dict[str, Any]:
    return {
        "parent": -1 if call.parent is None else call.parent,
        "prompt": call.prompt,
        "tokens": call.tokens,
        "logprobs": call.logprobs,
        "versions": call.versions,
        "finish_reason": call.finish_reason.value,
        "cached": call.cached,
        "started": call.started,
        "ended": call.ended,
        "experts": asdict(call.experts) if call.experts else None,
        "constrained": call.constrained,
    }


def _call(stored: Mapping[str, Any]) -> ModelCall:
    fields = dict(stored)
    fields["parent"] = None if fields["parent"] < 0 else fields["parent"]
    fields["finish_reason"] = FinishReason(fields["finish_reason"])
    if fields.get("experts"):
        fields["experts"] = ExpertChoices(**fields["experts"])
    return ModelCall(**fields)


def task_dict(task: Task) -> dict[str, Any]:
    """A task as JSON values."""
    return {**asdict(task), "data": dict(task.data), "labels": dict(task.labels)}


def rollout_dict(rollout: Rollout) -> dict[str, Any]:
    """A finished rollout as JSON values, for the journal. Log-probabilities come back exactly."""
    ending = rollout.ending
    return {
        "id": rollout.id,
        "task_id": rollout.task_id,
        "environment": rollout.environment,
        "member": rollout.member,
        "seed": rollout.seed,
        "calls": [_journalled(call) for call in rollout.calls],
        "transcript": rollout.transcript,
        "scored": [ending.reward, dict(ending.metrics), ending.solved] if isinstance(ending, Scored) else None,
        "failed": [ending.kind.value, ending.reason] if isinstance(ending, Failed) else None,
        "tries": rollout.tries,
        "forks": rollout.forks,
        "seconds": rollout.seconds,
        "started": rollout.started,
        "ended": rollout.ended,
    }


def rollout_from_dict(stored: Mapping[str, Any]) -> Rollout:
    """The inverse of `rollout_dict`."""
    fields = dict(stored)
    scored, failed = fields.pop("scored"), fields.pop("failed")
    ending = Scored(*scored) if scored else Failed(FailureKind(failed[0]), failed[1]) if failed else None
    return Rollout(**{**fields, "calls": [_from_journal(call) for call in fields["calls"]], "ending": ending})


def _journalled(call: ModelCall) -> dict[str, Any]:
    """A call as JSON values."""
    stored = _call_dict(call)
    if call.experts:
        stored["experts"]["ids"] = base64.b64encode(call.experts.ids).decode()
    return stored


def _from_journal(stored: Mapping[str, Any]) -> ModelCall:
    """The inverse of `_journalled`."""
    experts = stored.get("experts")
    return _call({**stored, "experts": experts and {**experts, "ids": base64.b64decode(experts["ids"])}})


def trained(groups: Iterable[tuple[Group, str]]) -> list[Group]:
    """Those that were trained on."""
    return [group for group, used in groups if used == "trained"]
