"""An environment of strop as a task of inspect_ai, over inspect's own mock model: run by the Python that has inspect_ai.

    PYTHONPATH=src PYTHON checks/inspect_export.py

Prints one JSON line: samples, their scores, and how many were errors.
"""

import json
import tempfile

from inspect_ai import eval
from inspect_ai.model import ModelOutput, ModelUsage, get_model

from strop.environments import load_environment
from strop.environments.exports.inspect_ai import strop_task

OPTIONS = {"fault_rate": 0.0, "test_tasks": 4}
tasks = list(load_environment("shopkeeper", OPTIONS).tasks("test"))
tool = tasks[0].tools[0]["function"]["name"]
outputs = []
for number, task in enumerate(tasks):  # every second answer is right
    outputs.append(ModelOutput.for_tool_call("mockllm/model", tool, {"item": "pears"}))
    outputs.append(ModelOutput.from_content("mockllm/model", f"It is {task.data['answer'] if number % 2 else -1}"))
for output in outputs:  # counted by inspect itself they would need a tokenizer from the network
    output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
with tempfile.TemporaryDirectory() as logs:
    (log,) = eval(
        strop_task("shopkeeper", OPTIONS),
        model=get_model("mockllm/model", custom_outputs=outputs),
        max_samples=1,
        display="none",
        log_dir=logs,
    )
    samples = log.samples or []
    scores = [sample.scores["strop_scorer"].value for sample in samples if sample.scores]
    print(json.dumps({"status": log.status, "samples": len(samples), "scores": scores, "error": str(log.error)[:300]}))
