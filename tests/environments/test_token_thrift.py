"""The start model reads few tokens: prompts and demonstrations of the shopkeeper stay short in its own tokenizer."""

from __future__ import annotations

import random
from statistics import fmean
from typing import Any

import pytest

from strop.environments.shopkeeper import Shopkeeper
from strop.models.start import start_model_folder
from strop.sampling.rendering import ChatMLRenderer, renderer_for, training_example

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    folder = start_model_folder("smollm2")
    if not folder.is_dir():
        pytest.skip("the start model is not cached: strop model get smollm2")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_plain_chats_are_what_the_start_models_template_writes(tokenizer: Any) -> None:
    renderer = renderer_for(tokenizer, "smollm2")
    assert isinstance(renderer, ChatMLRenderer)
    rng = random.Random(0)
    pieces = ["What is", " the", " 42 ", "\n", "\n\n", "  ", "apple", "12+7=", "é", "```py\n", "!", "Yes."]
    for _ in range(300):
        messages = []
        for _ in range(rng.randint(1, 5)):
            text, role = "".join(rng.choices(pieces, k=rng.randint(0, 6))), rng.choice(["user", "system", "assistant"])
            messages.append({"role": role, "content": text.strip() if role == "assistant" else text})
        for opened in (False, True):
            theirs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=opened, tokenize=True, return_dict=False
            )
            assert renderer.render_ids(messages, add_generation_prompt=opened) == theirs


def test_prompts_and_demonstrations_are_short(tokenizer: Any) -> None:
    renderer = renderer_for(tokenizer, "smollm2")
    prompts, whole = [], []
    for demonstration in Shopkeeper().demonstrations(200, random.Random(0)):
        task = demonstration.task
        prompts.append(
            len(renderer.render_ids(list(task.messages), tools=list(task.tools), add_generation_prompt=True))
        )
        whole.append(len(training_example(renderer, demonstration.messages, task.tools)[0]))
    assert max(prompts) < 150 and fmean(whole) < 400 and max(whole) < 768
