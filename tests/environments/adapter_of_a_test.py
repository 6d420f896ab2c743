"""An environment of another process, for tests: it acts through the model's URL, and can break in every way."""

import asyncio
import json
import os
import sys
import time
import urllib.request

from strop_worker import Failure


class Adapter:
    def __init__(self, name, options):
        self.options = options
        self.sizes = {"train": 8, "test": 2}
        if options.get("breaks_at_start"):
            raise RuntimeError("no such environment")
        sys.stdout.write("this is no message\n")  # goes to standard error

    def task(self, split, index):
        if self.options.get("wrong", {}).get(str(index)) == "unlisted":
            raise LookupError("no such row")
        return {
            "id": f"{split}-{index}",
            "messages": [{"role": "user", "content": f"Do {index}."}],
            "labels": {"n": index},
        }

    async def attempt(self, split, index, model, seed):
        wrong = self.options.get("wrong", {}).get(str(index))
        if wrong == "die":
            await asyncio.sleep(0.3)
            os._exit(3)
        if wrong == "hang":
            time.sleep(60)  # noqa: ASYNC251  (the event loop stands still, as is meant)
        if wrong == "scorer":
            raise Failure("scorer", "the reward function raised ValueError: nope")
        if wrong == "bug":
            raise KeyError("x")
        if wrong == "nan":
            return {"reward": float("nan")}
        body = {"model": model["name"], "messages": self.task(split, index)["messages"]}
        headers = {"authorization": "Bearer " + model["key"]}
        request = urllib.request.Request(model["url"] + "/v1/chat/completions", json.dumps(body).encode(), headers)
        answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request, timeout=20)))
        said = answer["choices"][0]["message"]["content"]
        return {"reward": 1.0 if said == "done" else 0.0, "metrics": {"pid": os.getpid()}, "solved": said == "done"}
